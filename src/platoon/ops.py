"""What all workers compute together, as part of a graph: for Theano, PyTensor, torch and NumPy.

A graph of Theano or PyTensor gets an Op, a torch tensor a function that autograd knows, an array its result
at once. All workers have to run the same graph. Of the sum there is a gradient: of the sum of all workers'
costs, so it is the sum of their gradients.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from platoon.channel.worker import Worker
from platoon.util import OPERATIONS, PlatoonError

__all__ = ["AllReduce", "AllReduceMax", "AllReduceMin", "AllReduceProd", "AllReduceSum"]


class AllReduce:
    """A reduction by any operation, as the older interface has it: ``AllReduce(theano.scalar.add)(src, dest)``.

    Args:
        scalar_op: an operation of `Worker.all_reduce`, by name or as the scalar Op of Theano or PyTensor.
        inplace: the result takes the place of ``src``.
        worker: the process's worker, if not the current one.

    Raises:
        PlatoonError: there is no such operation.
    """

    def __init__(self, scalar_op: Any, inplace: bool = False, worker: Worker | None = None) -> None:
        name = str(scalar_op).lower()
        if name not in OPERATIONS:
            raise PlatoonError(f"scalar_op is one of {', '.join(OPERATIONS)}; got {scalar_op!r}")
        self.operation = OPERATIONS[name]
        self.inplace = inplace
        self.worker = current_worker(worker)

    def __call__(self, src: Any, dest: Any = None) -> Any:
        """Returns the reduction of all workers' ``src``; see `AllReduceSum`."""
        return _all_reduce(self.operation, src, dest, self.inplace, self.worker)


def AllReduceSum(src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None) -> Any:
    """Returns the sum of all workers' ``src``.

    Args:
        src: a variable of Theano or PyTensor, a torch tensor, or an array; alike in all workers.
        dest: where the result goes, of the same type; None for a new one.
        inplace: the result takes the place of ``src`` (for a graph: compile it with ``accept_inplace=True``).
        worker: the process's worker, if not the current one.
    """
    return _all_reduce("sum", src, dest, inplace, worker)


def AllReduceProd(src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None) -> Any:
    """Returns the product of all workers' ``src``; see `AllReduceSum`."""
    return _all_reduce("product", src, dest, inplace, worker)


def AllReduceMax(src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None) -> Any:
    """Returns the maximum of all workers' ``src``; see `AllReduceSum`."""
    return _all_reduce("max", src, dest, inplace, worker)


def AllReduceMin(src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None) -> Any:
    """Returns the minimum of all workers' ``src``; see `AllReduceSum`."""
    return _all_reduce("min", src, dest, inplace, worker)


def current_worker(worker: Worker | None) -> Worker:
    """Returns the given worker, or this process's.

    Raises:
        TypeError: it is not a worker.
        PlatoonError: there is none yet.
    """
    if worker is None:
        worker = Worker.current()
        if worker is None:
            raise PlatoonError("this process has no worker yet: make a Worker() first")
    if not isinstance(worker, Worker):
        raise TypeError(f"worker has to be a platoon Worker; got {type(worker).__name__}")
    return worker


def _all_reduce(operation: str, src: Any, dest: Any, inplace: bool, worker: Worker | None) -> Any:
    worker = current_worker(worker)
    if dest is not None and inplace:
        raise PlatoonError("give dest, or say inplace=True, but not both")
    # A Theano variable is an object of a class of theano's own, and so on.
    framework = next((name for name in _modules(type(src)) if name in ("theano", "pytensor", "torch")), None)
    if framework in ("theano", "pytensor"):
        arguments = (src,) if dest is None else (src, dest)
        return graph_op(framework)(operation, inplace, worker)(*arguments)
    if framework == "torch" and operation == "sum" and dest is None and not inplace and src.requires_grad:
        return _torch_sum().apply(src, worker)
    target = src if inplace else dest
    result = worker.all_reduce(src if framework == "torch" else np.asarray(src), operation, target)
    return result if target is None else target


def _modules(kind: type) -> list[str]:
    return [base.__module__.partition(".")[0] for base in kind.__mro__]


@functools.cache
def graph_op(framework: str) -> Any:
    """Returns the class of the Op for ``"theano"`` or ``"pytensor"``."""
    names = {
        "theano": ("theano.gof", "theano.gof", "theano.tensor", "theano.gradient"),
        "pytensor": ("pytensor.graph.op", "pytensor.graph.basic", "pytensor.tensor", "pytensor.gradient"),
    }
    op, basic, tensor, gradient = map(importlib.import_module, names[framework])

    class AllReduce(op.Op):  # type: ignore[misc, name-defined]
        """A reduction over all workers as a node of a graph."""

        __props__ = ("operation", "inplace", "with_dest")

        def __init__(self, operation: str, inplace: bool, worker: Worker, with_dest: bool = False) -> None:
            super().__init__()
            self.operation = operation
            self.inplace = inplace
            self.with_dest = with_dest
            self.worker = worker
            if inplace or with_dest:
                self.destroy_map = {0: [int(with_dest)]}

        def __call__(self, src: Any, dest: Any = None, **more: Any) -> Any:
            if dest is None:
                return super().__call__(src, **more)
            return super(AllReduce, self._with_dest()).__call__(src, dest, **more)

        def _with_dest(self) -> Any:
            return type(self)(self.operation, False, self.worker, with_dest=True)

        def __getstate__(self) -> dict[str, Any]:
            # A worker belongs to its process; the process that loads the graph has another one.
            return {name: value for name, value in self.__dict__.items() if name != "worker"}

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            self.worker = current_worker(None)

        def make_node(self, *inputs: Any) -> Any:
            inputs = tuple(map(tensor.as_tensor_variable, inputs))
            if len(inputs) == 2 and inputs[0].type != inputs[1].type:
                raise TypeError(f"dest has to be of the type of src, {inputs[0].type}; got {inputs[1].type}")
            return basic.Apply(self, list(inputs), [inputs[0].type()])

        def perform(self, node: Any, inputs: list[Any], output_storage: list[Any], *more: Any) -> None:
            src = np.asarray(inputs[0])
            out = output_storage[0]
            if self.with_dest or self.inplace:
                target = inputs[int(self.with_dest)]
            else:
                target = out[0]
                if not _fits(target, src):
                    target = np.empty(src.shape, src.dtype)
            self.worker.all_reduce(src, self.operation, target)
            out[0] = target

        def infer_shape(self, *arguments: Any) -> list[Any]:
            return [arguments[-1][0]]

        def do_constant_folding(self, *arguments: Any) -> bool:
            # A constant is reduced when the graph runs: not every worker compiles at the same time.
            return False

        def connection_pattern(self, node: Any) -> list[list[bool]]:
            return [[i == 0] for i in range(len(node.inputs))]

        def __str__(self) -> str:
            where = "inplace" if self.inplace or self.with_dest else "no_inplace"
            return f"AllReduce{{{self.operation},{where}}}"

    def grad(self: Any, inputs: list[Any], output_gradients: list[Any]) -> list[Any]:
        if self.operation != "sum":
            return [gradient.grad_not_implemented(self, i, value) for i, value in enumerate(inputs)]
        first = type(self)("sum", False, self.worker)(output_gradients[0])
        return [first, *(gradient.DisconnectedType()() for _ in inputs[1:])]

    def pullback(self: Any, inputs: list[Any], outputs: list[Any], output_gradients: list[Any]) -> list[Any]:
        return grad(self, inputs, output_gradients)

    # PyTensor 3 warns of classes that have the older method.
    if hasattr(op.Op, "pullback"):
        AllReduce.pullback = pullback
    else:
        AllReduce.grad = grad
    # So that a graph can be pickled.
    AllReduce.__qualname__ = f"{framework.capitalize()}AllReduce"
    return AllReduce


def __getattr__(name: str) -> Any:
    # A pickled graph looks its Op up here.
    if name in ("TheanoAllReduce", "PytensorAllReduce"):
        return graph_op(name.removesuffix("AllReduce").lower())
    raise AttributeError(f"module 'platoon.ops' has no attribute {name!r}")


def _fits(target: Any, src: Any) -> bool:
    return (
        isinstance(target, np.ndarray)
        and target.shape == src.shape
        and target.dtype == src.dtype
        and target.flags.writeable
        and not np.shares_memory(target, src)
    )


@functools.cache
def _torch_sum() -> Any:
    import torch

    class AllReduceSumFunction(torch.autograd.Function):  # type: ignore[misc]
        """The sum over all workers, and the sum of their gradients."""

        @staticmethod
        def forward(context: Any, src: Any, worker: Worker) -> Any:
            context.worker = worker
            return worker.all_reduce(src, "sum")

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            return context.worker.all_reduce(gradients[0].contiguous(), "sum"), None

    return AllReduceSumFunction
