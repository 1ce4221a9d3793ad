"""The compiled forms of what stands in ``atomics``, by the same names.

A plain load in a wait loop is optimised away: hence intrinsics. libc's functions are declared as external, so that
the object code names them and nothing of this process.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import platform
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
from multiverso.compiling.object_code import PYTHON_FACTS

_I32, _I64, _I8 = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_LINE = 64
_MOST_SCRATCH = 64 * 1024
_SECOND = 1_000_000_000
_inline = njit(nogil=True, error_model="numpy")


def _load(bits: ir.IntType, size: int, numba_type: Any) -> Any:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load_atomic(builder.inttoptr(args[0], bits.as_pointer()), "seq_cst", size)

        return numba_type(types.uintp), codegen

    return load


def _store(bits: ir.IntType, size: int, numba_type: Any) -> Any:
    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], bits.as_pointer())
            builder.store_atomic(args[1], pointer, "seq_cst", size)
            return context.get_dummy_value()

        return types.void(types.uintp, numba_type), codegen

    return store


def _fetch_add(bits: ir.IntType, numba_type: Any) -> Any:
    @intrinsic
    def fetch_add(typingctx, address, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw("add", builder.inttoptr(args[0], bits.as_pointer()), args[1], "seq_cst")

        return numba_type(types.uintp, numba_type), codegen

    return fetch_add


load32 = _load(_I32, 4, types.int32)
load64 = _load(_I64, 8, types.int64)
store32 = _store(_I32, 4, types.int32)
store64 = _store(_I64, 8, types.int64)
add32 = _fetch_add(_I32, types.int32)
add64 = _fetch_add(_I64, types.int64)


@intrinsic
def compare_swap64(typingctx, address, old, new):
    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst"), 0)

    return types.int64(types.uintp, types.int64, types.int64), codegen


@intrinsic
def pointer_at(typingctx, address):
    """An address as a pointer that ``numba.carray`` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.voidptr(types.uintp), codegen


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


def _libc(name: str, *signature: Any) -> Any:
    return types.ExternalFunction(name, typing.signature(*signature))


_syscall = _libc("syscall", _long, _long, _address, _long, _long, _address, _long, _long)
_errno_location = _libc("__errno_location", _address)
_clock_gettime = _libc("clock_gettime", _int, _int, _address)
sched_yield = _libc("sched_yield", _int)


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
    byte = _I8.as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte if kind == "p" else _I64 for kind in kinds])

    def codegen(context, builder, signature, args):
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        given = zip(kinds, args[1:], strict=True)
        builder.call(callee, [builder.inttoptr(a, byte) if kind == "p" else a for kind, a in given])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def call_update(typingctx, function, values, delta, state, stride, hyper, count):
    return _call("pppnpn")


@intrinsic
def call_push(typingctx, function, centre, local, state, stride, hyper, delta, count):
    return _call("pppnppn")


@intrinsic
def call_pull(typingctx, function, centre, local, state, stride, hyper, count):
    return _call("pppnpn")


def _ordered(order: str) -> tuple[Any, Any]:
    """A load and a store of an int64; on x86-64 a plain move each, where seq_cst stores cost 20 cycles."""

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

        return types.int64(types.uintp), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)
            return context.get_dummy_value()

        return types.void(types.uintp, types.int64), codegen

    return load, store


load_acquire64, store_release64 = _ordered("acquire")


@intrinsic
def load_double(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], ir.DoubleType().as_pointer()))

    return types.float64(types.uintp), codegen


@intrinsic
def load_float32(typingctx, address):
    def codegen(context, builder, signature, args):
        number = builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()))
        return builder.fpext(number, ir.DoubleType())

    return types.float64(types.uintp), codegen


def _fence(order: str) -> Any:
    @intrinsic
    def fence(typingctx):
        def codegen(context, builder, signature, args):
            builder.fence(order)
            return context.get_dummy_value()

        return types.void(), codegen

    return fence


fence_acquire, fence_release, fence_all = _fence("acquire"), _fence("release"), _fence("seq_cst")


def _builtin(builder: Any, name: str, kinds: list[Any], *values: Any) -> Any:
    signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    return builder.call(builder.module.declare_intrinsic(name, kinds, signature), values)


def _prefetch(write: int) -> Any:
    @intrinsic
    def prefetch(typingctx, address):
        def codegen(context, builder, signature, args):
            byte = _I8.as_pointer()
            place = builder.inttoptr(args[0], byte)
            _builtin(builder, "llvm.prefetch", [byte], place, _I32(write), _I32(3), _I32(1))
            return context.get_dummy_value()

        return types.void(types.uintp), codegen

    return prefetch


prefetch, prefetch_to_write = _prefetch(0), _prefetch(1)


@intrinsic
def pause(typingctx):
    def codegen(context, builder, signature, args):
        if platform.machine() == "x86_64":
            _builtin(builder, "llvm.x86.sse2.pause", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def move(typingctx, to, source, nbytes):
    def codegen(context, builder, signature, args):
        byte = _I8.as_pointer()
        to, source = (builder.inttoptr(a, byte) for a in args[:2])
        flag = ir.Constant(ir.IntType(1), 0)
        _builtin(builder, "llvm.memcpy", [byte, byte, _I64], to, source, args[2], flag)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.int64), codegen


@intrinsic
def move_line(typingctx, to, source):
    def codegen(context, builder, signature, args):
        line = ir.VectorType(_I64, _LINE // 8).as_pointer()
        to, source = (builder.inttoptr(a, line) for a in args)
        builder.store(builder.load(source, align=1), to, align=1)
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp), codegen


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


@intrinsic
def trailing_zeros(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), codegen


_U64 = types.uint64


@_inline
def hash64(value):
    x = _U64(value) + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return types.int64(x ^ (x >> _U64(31)))


def _number(kind: Any, numba_type: Any) -> Any:
    @intrinsic
    def put(typingctx, address, value):
        def codegen(context, builder, signature, args):
            number = context.cast(builder, args[1], types.float64, numba_type)
            builder.store(number, builder.inttoptr(args[0], kind.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.uintp, types.float64), codegen

    return put


store_float32 = _number(ir.FloatType(), types.float32)
store_float64 = _number(ir.DoubleType(), types.float64)
store_int32 = _number(_I32, types.int32)
store_int64 = _number(_I64, types.int64)


@intrinsic
def object_head(typingctx):
    def codegen(context, builder, signature, args):
        facts = builder.module.globals.get(PYTHON_FACTS) or ir.GlobalVariable(
            builder.module, ir.ArrayType(_I64, 2), PYTHON_FACTS
        )
        return builder.load(builder.gep(facts, [_I32(0), _I32(1)]))

    return types.uintp(), codegen
