"""The compiled forms of what stands in ``atomics``, by the same names.

A plain load in a wait loop is optimised away: hence intrinsics. libc's functions are declared as external, so that
the object code names them and nothing of this process.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"

from __future__ import annotations

import platform
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils, typing
from numba.extending import intrinsic

from multiverso.compiling.atomics import (
    ALL,
    CLOCK_MONOTONIC,
    FUTEX_CALL,
    FUTEX_WAIT,
    FUTEX_WAKE,
    MADVISE_CALL,
    POPULATE_WRITE,
)
from multiverso.compiling.functions import PYTHON_FACTS

_I32, _I64, _I8 = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_LINE = 64
_MOST_SCRATCH = 64 * 1024
_SECOND = 1_000_000_000
_inline = njit(nogil=True, error_model="numpy")


def instruction(signature: Any, emit: Any) -> Any:
    """Returns what kernels call for the instructions that ``emit(builder, *arguments)`` adds where they do."""

    def added(typingctx, *arguments):
        def codegen(context, builder, typed, args):
            result = emit(builder, *args)
            return context.get_dummy_value() if typed.return_type == types.void else result

        return signature, codegen

    names = "typingctx", *(f"argument{i}" for i in range(len(signature.args)))  # Numba would make a tuple of others
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    added.__signature__ = Signature(parameters)
    return intrinsic(added)


def _to(kind: Any, builder: Any, address: Any) -> Any:
    """An address as a pointer to something."""
    return builder.inttoptr(address, kind.as_pointer())


def loaded(kind: Any, number: Any) -> Any:
    """Returns what kernels call for what lies at an address, and does not change meanwhile."""
    return instruction(number(types.uintp), lambda builder, at: builder.load(_to(kind, builder, at)))


def global_at(name: str) -> Any:
    """Returns what kernels call for the address of a variable of Python's, or of ours."""
    return instruction(
        types.int64(),
        lambda builder: builder.ptrtoint(
            builder.module.globals.get(name) or ir.GlobalVariable(builder.module, _I8, name), _I64
        ),
    )


def _word(kind: ir.IntType, number: Any) -> tuple[Any, Any, Any]:
    """A load, a store and an addition of whole numbers, in the one order of all."""
    size = kind.width // 8
    return (
        instruction(
            number(types.uintp), lambda builder, at: builder.load_atomic(_to(kind, builder, at), "seq_cst", size)
        ),
        instruction(
            types.void(types.uintp, number),
            lambda builder, at, value: builder.store_atomic(value, _to(kind, builder, at), "seq_cst", size),
        ),
        instruction(
            number(types.uintp, number),
            lambda builder, at, value: builder.atomic_rmw("add", _to(kind, builder, at), value, "seq_cst"),
        ),
    )


load32, store32, add32 = _word(_I32, types.int32)
load64, store64, add64 = _word(_I64, types.int64)
compare_swap64 = instruction(
    types.int64(types.uintp, types.int64, types.int64),
    lambda builder, at, old, new: builder.extract_value(
        builder.cmpxchg(_to(_I64, builder, at), old, new, "seq_cst", "seq_cst"), 0
    ),
)
# an address as what ``numba.carray`` takes
pointer_at = instruction(types.voidptr(types.uintp), lambda builder, at: _to(_I8, builder, at))


@_inline
def array_at(address, count, like):
    return carray(pointer_at(address), (count,), like.dtype)


@_inline
def record_at(address, dtype):
    return carray(pointer_at(address), (1,), dtype)[0]


def _stack(builder: Any, size: int) -> Any:
    """A place in the caller's frame, whose memory is taken once, wherever in a loop it is asked for."""
    with builder.goto_entry_block():  # not Numba's alloca_once, which writes zeros
        place = builder.alloca(ir.ArrayType(_I8, size))
    place.align = _LINE
    return place


def _array(context: Any, builder: Any, array_type: Any, place: Any, count: int) -> Any:
    from numba.np import arrayobj

    array = arrayobj.make_array(array_type)(context, builder)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
    arrayobj.populate_array(
        array,
        data=builder.bitcast(place, context.get_data_type(array_type.dtype).as_pointer()),
        shape=[context.get_constant(types.intp, count)],
        strides=[itemsize],
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()


@intrinsic(prefer_literal=True)
def scratch(typingctx, count, like):
    if not isinstance(count, types.IntegerLiteral):
        return None
    array_type = types.Array(like.dtype, 1, "C")
    number = count.literal_value

    def codegen(context, builder, signature, args):
        size = number * context.get_abi_sizeof(context.get_data_type(array_type.dtype))
        if size > _MOST_SCRATCH:
            raise ValueError(f"{size} bytes are too many for the stack")
        return _array(context, builder, array_type, _stack(builder, size), number)

    return array_type(count, like), codegen


@intrinsic(prefer_literal=True)
def words(typingctx, count):
    if not isinstance(count, types.IntegerLiteral):
        return None
    array_type = types.Array(types.int64, 1, "C")
    number = count.literal_value

    def codegen(context, builder, signature, args):
        place = _stack(builder, 8 * number)
        cgutils.memset(builder, place, ir.Constant(_I64, 8 * number), 0)
        return _array(context, builder, array_type, place, number)

    return array_type(count), codegen


_int, _long, _address = types.intc, types.int64, types.uintp


def external(name: str, *signature: Any) -> Any:
    """Returns a function of libc or Python, given the types of what it returns and takes."""
    return types.ExternalFunction(name, typing.signature(*signature))


_syscall = external("syscall", _long, _long, _address, _long, _long, _address, _long, _long)
_errno_location = external("__errno_location", _address)
_clock_gettime = external("clock_gettime", _int, _int, _address)
sched_yield = external("sched_yield", _int)


@_inline
def monotonic_ns():
    time = words(2)
    _clock_gettime(CLOCK_MONOTONIC, time.ctypes.data)
    return time[0] * _SECOND + time[1]


@_inline
def futex_wait(address, value, nanoseconds):
    time = words(2)
    time[0], time[1] = nanoseconds // _SECOND, nanoseconds % _SECOND
    if _syscall(FUTEX_CALL, address, FUTEX_WAIT, value, time.ctypes.data, 0, 0) != 0:
        return load32(_errno_location())
    return types.int32(0)


@_inline
def futex_wake(address):
    _syscall(FUTEX_CALL, address, FUTEX_WAKE, ALL, 0, 0, 0)
    return types.int32(0)


@_inline
def populate(address, nbytes):
    if _syscall(MADVISE_CALL, address, nbytes, POPULATE_WRITE, 0, 0, 0) != 0:
        return load32(_errno_location())
    return types.int32(0)


def _call(kinds: str) -> Any:
    """Calls a loop by its address; p is an address, n a number."""
    signature = types.void(_address, *(_address if kind == "p" else _long for kind in kinds))
    loop = ir.FunctionType(ir.VoidType(), [_I8.as_pointer() if kind == "p" else _I64 for kind in kinds])

    def emit(builder, function, *given):
        callee = _to(loop, builder, function)
        pairs = zip(kinds, given, strict=True)
        builder.call(callee, [_to(_I8, builder, each) if kind == "p" else each for kind, each in pairs])

    return instruction(signature, emit)


call_update, call_push, call_pull = _call("pppnpn"), _call("pppnppn"), _call("pppnpn")

# on x86-64 a plain move each, where seq_cst stores cost 20 cycles
load_acquire64 = instruction(
    types.int64(types.uintp), lambda builder, at: builder.load_atomic(_to(_I64, builder, at), "acquire", 8)
)
store_release64 = instruction(
    types.void(types.uintp, types.int64),
    lambda builder, at, value: builder.store_atomic(value, _to(_I64, builder, at), "release", 8),
)
load_double = loaded(ir.DoubleType(), types.float64)
load_float32 = loaded(ir.FloatType(), types.float32)
fence_acquire = instruction(types.void(), lambda builder: builder.fence("acquire"))
fence_release = instruction(types.void(), lambda builder: builder.fence("release"))
fence_all = instruction(types.void(), lambda builder: builder.fence("seq_cst"))


def _builtin(builder: Any, name: str, kinds: list[Any], *values: Any) -> Any:
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    return builder.call(builder.module.declare_intrinsic(name, kinds, signature), values)


def _prefetch(write: int) -> Any:
    def emit(builder, address):
        byte = _I8.as_pointer()
        place = builder.inttoptr(address, byte)
        _builtin(builder, "llvm.prefetch", [byte], place, _I32(write), _I32(3), _I32(1))

    return instruction(types.void(types.uintp), emit)


prefetch, prefetch_to_write = _prefetch(0), _prefetch(1)


def _pause(builder):
    if platform.machine() == "x86_64":
        _builtin(builder, "llvm.x86.sse2.pause", [])


def _move(builder, to, source, nbytes):
    byte = _I8.as_pointer()
    to, source = (builder.inttoptr(each, byte) for each in (to, source))
    _builtin(builder, "llvm.memcpy", [byte, byte, _I64], to, source, nbytes, ir.Constant(ir.IntType(1), 0))


def _move_line(builder, to, source):
    line = ir.VectorType(_I64, _LINE // 8)
    to, source = (_to(line, builder, each) for each in (to, source))
    builder.store(builder.load(source, align=1), to, align=1)


pause = instruction(types.void(), _pause)
move = instruction(types.void(types.uintp, types.uintp, types.int64), _move)
move_line = instruction(types.void(types.uintp, types.uintp), _move_line)
trailing_zeros = instruction(
    types.int64(types.int64), lambda builder, value: builder.cttz(value, ir.Constant(ir.IntType(1), 0))
)


@intrinsic
def add_line(typingctx, to, source, like):
    def codegen(context, builder, signature, args):
        number = context.get_data_type(signature.args[2].dtype)
        size = context.get_abi_sizeof(number)
        line = ir.VectorType(number, _LINE // size).as_pointer()
        to, source = (builder.inttoptr(a, line) for a in args[:2])
        of_floats = isinstance(number, ir.FloatType | ir.DoubleType)
        add = builder.fadd if of_floats else builder.add
        builder.store(add(builder.load(to, align=size), builder.load(source, align=size)), to, align=size)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, like), codegen


_U64 = types.uint64


@_inline
def hash64(value):
    x = _U64(value) + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return types.int64(x ^ (x >> _U64(31)))


def _put(kind: Any, narrowed: str = "bitcast") -> Any:
    """Stores a number as one of this kind."""
    return instruction(
        types.void(types.uintp, types.float64),
        lambda builder, at, value: builder.store(getattr(builder, narrowed)(value, kind), _to(kind, builder, at)),
    )


store_float32, store_float64 = _put(ir.FloatType(), "fptrunc"), _put(ir.DoubleType())
store_int32, store_int64 = _put(_I32, "fptosi"), _put(_I64, "fptosi")
_facts, _fact = global_at(PYTHON_FACTS), loaded(_I64, types.int64)


@_inline
def object_head():
    return _fact(_facts() + 8)
