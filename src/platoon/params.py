"""Parameters of any framework as arrays that a rule can work on in place.

A parameter on the processor that is contiguous and of a shared dtype is used as it is, without a copy. Any
other (on a GPU, transposed, 16-bit) is copied into a buffer before an exchange and out of it after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from platoon.util import PlatoonError

Array = npt.NDArray[Any]
SHARED_DTYPES = ("float32", "float64", "int32", "int64")


@dataclass(frozen=True)
class Parameter:
    """One parameter: how to see it as an array, and how to give it a value.

    Attributes:
        read: returns its value; the parameter's own memory where that is possible.
        write: sets its value; called after the array that `read` returned, or another, was worked on.
        dtype: the dtype in which it is shared.
        shape: its shape.
    """

    read: Callable[[], Array]
    write: Callable[[Array], None]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def load(self) -> Array:
        """Returns the value, contiguous, writable, of the shared dtype: its own memory if it is all this."""
        value = self.read()
        if value.flags.carray and value.dtype == self.dtype:
            return value
        return np.require(value, self.dtype, ("C", "W", "A"))


def adapt(parameters: Any) -> list[Parameter]:
    """Returns what can be shared of a list of parameters, or of a model.

    Args:
        parameters: NumPy arrays, torch parameters, Theano or PyTensor shared variables, Keras variables, or
            anything with ``get_value()`` and ``set_value(value)``; or a torch module or a Keras model (all
            its variables).

    Raises:
        PlatoonError: something cannot be shared.
    """
    if hasattr(parameters, "parameters") and callable(parameters.parameters):
        parameters = parameters.parameters()  # a torch module
    elif hasattr(parameters, "weights") and hasattr(parameters, "layers"):
        parameters = parameters.weights  # a Keras model
    elif _kind(parameters) is not None or not isinstance(parameters, Iterable):
        parameters = [parameters]
    given = list(parameters)
    _refuse_tied(given)
    return [_adapt(parameter) for parameter in given]


def _refuse_tied(parameters: list[Any]) -> None:
    """What lies in the same memory would be changed once for each time that it is listed."""
    seen = {id(parameter): number for number, parameter in enumerate(parameters)}
    for number, parameter in enumerate(parameters):
        if seen[id(parameter)] != number:
            raise PlatoonError(f"parameters {number} and {seen[id(parameter)]} are the same one: list it once")
    arrays = [(number, one) for number, one in enumerate(parameters) if isinstance(one, np.ndarray)]
    for (number, one), (other, another) in itertools.combinations(arrays, 2):
        if np.may_share_memory(one, another) and np.shares_memory(one, another):
            raise PlatoonError(f"parameters {number} and {other} share memory: list the array that holds both")


def _kind(parameter: Any) -> Callable[[Any], Parameter] | None:
    """Returns what adapts a parameter, or None if it is not one."""
    if isinstance(parameter, np.ndarray):
        return _of_numpy
    if hasattr(parameter, "get_value") and hasattr(parameter, "set_value"):
        return _of_shared_variable
    if hasattr(parameter, "detach") and hasattr(parameter, "data_ptr"):
        return _of_torch
    if hasattr(parameter, "assign") and hasattr(parameter, "numpy"):
        return _of_keras
    return None


def _adapt(parameter: Any) -> Parameter:
    kind = _kind(parameter)
    if kind is not None:
        return kind(parameter)
    raise PlatoonError(
        f"{type(parameter).__name__} is not a parameter; expected a NumPy array, a torch tensor, a Theano, "
        "PyTensor or Keras variable, or something with get_value() and set_value(value)"
    )


def shared_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in which a parameter of some dtype is shared: 16-bit floats as float32.

    Raises:
        PlatoonError: such a parameter cannot be shared.
    """
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if name not in SHARED_DTYPES:
        raise PlatoonError(f"a parameter of dtype {name} cannot be shared; expected {', '.join(SHARED_DTYPES)}")
    return np.dtype(name)


def _of_numpy(array: Array) -> Parameter:
    if not array.flags.writeable:
        raise PlatoonError(f"an array of shape {array.shape} is read-only, so no parameter can be kept in it")

    def write(value: Array) -> None:
        if value is not array:
            np.copyto(array, value, casting="same_kind")

    return Parameter(lambda: array, write, shared_dtype(array.dtype), array.shape)


def _of_shared_variable(variable: Any) -> Parameter:
    first = np.asarray(variable.get_value(borrow=True))

    def write(value: Array) -> None:
        variable.set_value(value.astype(first.dtype, copy=False), borrow=True)

    def read() -> Array:
        return np.asarray(variable.get_value(borrow=True))

    return Parameter(read, write, shared_dtype(first.dtype), first.shape)


def _of_torch(tensor: Any) -> Parameter:
    import torch

    dtype = shared_dtype(tensor.dtype)
    torch_dtype = getattr(torch, dtype.name)

    def read() -> Array:
        array: Array = tensor.detach().to("cpu", torch_dtype).contiguous().numpy()
        return array

    own = tensor.device.type == "cpu" and tensor.dtype == torch_dtype and tensor.is_contiguous()

    def write(value: Array) -> None:
        # What `read` returned is the tensor's own memory, unless the user gave the parameter other data
        # since.
        if own and tensor.data_ptr() == value.ctypes.data:
            return
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(value))

    return Parameter(read, write, dtype, tuple(tensor.shape))


def _of_keras(variable: Any) -> Parameter:
    def read() -> Array:
        # A copy: on torch `numpy()` may be the variable's own memory and on JAX it is read-only.
        return np.array(variable.numpy())

    return Parameter(read, variable.assign, shared_dtype(np.dtype(variable.dtype)), tuple(variable.shape))
