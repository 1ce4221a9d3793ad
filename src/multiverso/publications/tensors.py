"""What is published: the tensors of a model, and where each lies in a slot."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.layout.publications import META
from multiverso.layout.words import CACHE_LINE, PAGE, round_up

Array = npt.NDArray[Any]
_SHOWN = 4


class Tensor(Struct, frozen=True):
    """One tensor of a publication.

    Attributes:
        names: what it is called; several for a tensor that a model has under several names.
        dtype: by NumPy's or ml-dtypes' name, which is torch's, too: ``"bfloat16"``, ``"float8_e4m3fn"``.
        shape: of it.
        offset: where it begins in a slot, in bytes.
        nbytes: its size.
    """

    names: list[str]
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int

    @property
    def words(self) -> int:
        """The 64-bit words that it takes, the last one filled up with zeros."""
        return -(-self.nbytes // 8)

    @property
    def itemsize(self) -> int:
        """As many bytes as are compared at once: a number's, or half of a large complex one's."""
        count = int(np.prod(self.shape, dtype=np.int64))
        return min(8, self.nbytes // count) if count else 1

    def __str__(self) -> str:
        return f"{self.names[0]!r}: {self.dtype} {tuple(self.shape)}"


class Layout(Struct, frozen=True):
    """All tensors of a publication.

    Attributes:
        tensors: in their order.
        slot_bytes: of a whole version, with what is said of it.
    """

    tensors: list[Tensor]
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def by_name(self) -> dict[str, int]:
        """The number of each name's tensor."""
        return {name: number for number, tensor in enumerate(self.tensors) for name in tensor.names}


def check_layout(layout: Layout) -> None:
    """Refuses a layout that came from another host, and whose tensors do not lie in a slot.

    Raises:
        ValueError: which one.
    """
    sizes = [tensor.nbytes for tensor in layout.tensors]
    least, names = META.size + 8 * len(sizes), [name for tensor in layout.tensors for name in tensor.names]
    for tensor in layout.tensors:
        count = int(np.prod(tensor.shape, dtype=object)) if min(tensor.shape, default=0) >= 0 else -1
        fits = least <= tensor.offset <= layout.slot_bytes - tensor.nbytes and tensor.offset % CACHE_LINE == 0
        whole = tensor.nbytes == 0 if count == 0 else count > 0 and tensor.nbytes % count == 0
        if not (fits and whole and tensor.names and tensor.nbytes >= 0):
            raise ValueError(f"a tensor that does not lie in a slot of {layout.slot_bytes} bytes: {tensor!r}")
        least = tensor.offset + tensor.nbytes
    if len(set(names)) < len(names) or not names or layout.slot_bytes % PAGE:
        raise ValueError("a layout with two tensors of one name, with none, or with slots of odd sizes")


class Leaf(Struct, frozen=True):
    """A tensor of a model.

    Attributes:
        place: where it lies and how: the same for two names of one tensor.
        address: of its bytes in this process's memory, where they lie as in a slot.
        memory: keeps it there.
        bring: where they lie otherwise (with gaps, on an accelerator): returns a copy's bytes. None has an address.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: tuple[object, ...]
    address: int = 0
    memory: Any = None
    bring: Callable[[], npt.NDArray[np.uint8]] | None = None


def layout_of(leaves: Mapping[str, Leaf]) -> Layout:
    """Returns where the tensors of a model are to lie; a tensor that has several names lies there once."""
    names: dict[object, list[str]] = {}
    for name, leaf in leaves.items():
        names.setdefault(leaf.place if leaf.nbytes else name, []).append(name)
    offset = round_up(META.size + 8 * len(names), PAGE)
    tensors = []
    for alike in names.values():
        leaf = leaves[alike[0]]
        tensors.append(Tensor(alike, leaf.dtype, list(leaf.shape), offset, leaf.nbytes))
        offset = round_up(offset + leaf.nbytes, CACHE_LINE)
    return Layout(tensors, round_up(offset, PAGE))


def arranged(leaves: Mapping[str, Leaf], layout: Layout) -> list[Leaf]:
    """Returns a model's tensors in the order of a layout.

    Raises:
        ShapeMismatchError: other names or shapes, or two tensors where the layout has one.
        DtypeMismatchError: another dtype.
    """
    check_names(leaves, layout)
    found = []
    for tensor in layout.tensors:
        leaf = leaves[tensor.names[0]]
        check_like(tensor, leaf.dtype, leaf.shape)
        apart = [name for name in tensor.names if leaves[name].place != leaf.place]
        if apart and leaf.nbytes:
            raise ShapeMismatchError(
                f"{tensor.names[0]!r} and {apart[0]!r} were one tensor when the publication was made, and are two now: "
                "make a publication of another name for a model that does not tie them"
            )
        found.append(leaf)
    return found


def check_names(names: Mapping[str, Any], layout: Layout) -> None:
    """Refuses another list of names.

    Raises:
        ShapeMismatchError: which ones are missing, and which are not known.
    """
    expected = layout.by_name
    missing, unknown = [n for n in expected if n not in names], [n for n in names if n not in expected]
    if missing or unknown:
        said = [f"{what} {_some(which)}" for what, which in (("it lacks", missing), ("it has", unknown)) if which]
        raise ShapeMismatchError(
            f"these are not the tensors of the publication, which has {len(expected)}: {', and '.join(said)}"
        )


def check_like(tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuses another dtype or shape."""
    if tuple(tensor.shape) != shape:
        raise ShapeMismatchError(f"the publication has {tensor}; got the shape {shape}")
    if tensor.dtype != dtype:
        raise DtypeMismatchError(f"the publication has {tensor}; got {dtype}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


# -- from a model ------------------------------------------------------------------------------------------------


def leaves_of(model: Any) -> dict[str, Leaf]:
    """Returns the tensors of a model, by name.

    Args:
        model: a PyTorch module (its ``state_dict()``), a Keras model (its weights, by path), or arrays and tensors in
            dicts, lists and tuples, nested or not, whose keys and places make the names, joined by dots.

    Raises:
        TypeError: something else.
        ValueError: two tensors of one name, or none at all.
    """
    leaves: dict[str, Leaf] = {}
    for name, value in named(model):
        if name in leaves:
            raise ValueError(f"two tensors are called {name!r}: names are made of keys and places, joined by dots")
        leaves[name] = _leaf(name, value)
    if not leaves:
        raise ValueError("there is nothing to publish: no array in it")
    return leaves


def named(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields each tensor of a model with its name; a Keras model's variables as they are."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):  # before PyTorch: on it they are modules, too
        return ((variable.path, variable) for variable in model.weights)
    if "torch" in sys.modules and callable(getattr(model, "state_dict", None)):
        return _nested("", model.state_dict())
    return _nested("", model)


def _nested(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        parts = zip(fields, value, strict=True) if fields else enumerate(value)
    else:
        return iter([(prefix, value)])
    return itertools.chain.from_iterable(
        _nested(f"{prefix}.{key}" if prefix else str(key), each) for key, each in parts
    )


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, Leaf):
        return value
    if hasattr(value, "assign") and hasattr(value, "value") and "keras" in sys.modules:
        value = value.value
    if is_torch(value):
        return _torch_leaf(name, value.detach())
    called = repr(name) if name else "what is published"
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"{called} is {value!r:.80}: a publication is made of arrays and tensors")
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" and array.dtype.type.__module__ != "ml_dtypes":
        raise TypeError(f"{called} is {array.dtype}: a publication is made of arrays of numbers")
    address, kind = array.__array_interface__["data"][0], array.dtype.name
    place = (address, array.dtype.str, array.shape, array.strides)
    if array.flags.c_contiguous and array.dtype.isnative:
        return Leaf(kind, array.shape, array.nbytes, place, address, array)
    native = array.dtype.newbyteorder("=")
    return Leaf(
        kind,
        array.shape,
        array.nbytes,
        place,
        bring=lambda: np.ascontiguousarray(array, native).reshape(-1).view(np.uint8),
    )


def _torch_leaf(name: str, tensor: Any) -> Leaf:
    """Returns the leaf of a tensor without a gradient."""
    check_dense(name, tensor)
    shape, nbytes, address = tuple(tensor.shape), tensor.numel() * tensor.element_size(), tensor.data_ptr()
    place = (str(tensor.device), address, str(tensor.dtype), shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return Leaf(dtype, shape, nbytes, place, address, tensor)

    def bring() -> npt.NDArray[np.uint8]:
        copy = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        memory: npt.NDArray[np.uint8] = copy.view(sys.modules["torch"].uint8).numpy()
        return memory

    return Leaf(dtype, shape, nbytes, place, bring=bring)


def check_dense(name: str, tensor: Any) -> None:
    """Refuses a PyTorch tensor whose numbers do not all lie in memory of its own.

    Raises:
        TypeError: why.
    """
    if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided":
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise TypeError(f"{name!r} is {kind}: give dense tensors")
    if tensor.numel() and not tensor.data_ptr():
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__} on {tensor.device} without memory of its own: give whole tensors; "
            "of a DTensor, what full_tensor() returns, which all workers call"
        )


def is_torch(value: Any) -> bool:
    """Returns whether it is a PyTorch tensor; imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


# -- to arrays -----------------------------------------------------------------------------------------------------


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of that name.

    Raises:
        DtypeMismatchError: NumPy has none without ml-dtypes.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    except (ImportError, AttributeError) as error:
        raise DtypeMismatchError(
            f"NumPy has no {name}: pip install ml-dtypes, or take PyTorch tensors by snapshot.torch()"
        ) from error


def as_array(memory: npt.NDArray[np.uint8], tensor: Tensor) -> Array:
    """Returns a tensor in a slot as an array that is not to be written to."""
    flat = memory[tensor.offset : tensor.offset + tensor.nbytes].view(numpy_dtype(tensor.dtype))
    array = flat.reshape(tensor.shape)
    array.flags.writeable = False
    return array


def as_jax(memory: npt.NDArray[np.uint8], tensor: Tensor) -> Any:
    """Returns a tensor in a slot as JAX's; one of a dtype that DLPack does not know is a copy."""
    import jax

    dtype = numpy_dtype(tensor.dtype)
    array = memory[tensor.offset : tensor.offset + tensor.nbytes].view(dtype).reshape(tensor.shape)
    return jax.numpy.array(array) if dtype.type.__module__ == "ml_dtypes" else jax.dlpack.from_dlpack(array)


def as_tensor(memory: npt.NDArray[np.uint8], tensor: Tensor) -> Any:
    """Returns a tensor in a slot as PyTorch's."""
    import torch

    dtype = getattr(torch, tensor.dtype)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = torch.from_numpy(memory[tensor.offset : tensor.offset + tensor.nbytes])
    return flat.view(dtype).reshape(tensor.shape)
