"""Atomic loads and stores, libc calls and raw memory, for use inside cached kernels.

A plain load in a wait loop is optimised away, and a kernel that closes over a ctypes pointer is never cached:
hence intrinsics and ``ExternalFunction``.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import typing
from numba.extending import intrinsic

_I32, _I64, _I8 = ir.IntType(32), ir.IntType(64), ir.IntType(8)
_MACHINE = platform.machine()
FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(_MACHINE, 98)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # never FUTEX_PRIVATE: the words are shared between processes


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
    """Returns what the word held; it holds ``new`` afterwards if that was ``old``."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "seq_cst", "seq_cst"), 0)

    return types.int64(types.uintp, types.int64, types.int64), codegen


@intrinsic
def void_pointer(typingctx, address):
    """Returns an address as a pointer that ``numba.carray`` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _I8.as_pointer())

    return types.voidptr(types.uintp), codegen


@intrinsic
def call_update(typingctx, function, values, delta, state, stride, hyper, count):
    """Calls a compiled updater by its address, so that one cached kernel serves every updater."""

    def codegen(context, builder, signature, args):
        byte = _I8.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte, byte, byte, _I64, byte, _I64])
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        values, delta, state, hyper = (builder.inttoptr(args[i], byte) for i in (1, 2, 3, 5))
        builder.call(callee, [values, delta, state, args[4], hyper, args[6]])
        return context.get_dummy_value()

    u, i = types.uintp, types.int64
    return types.void(u, u, u, u, i, u, i), codegen


@intrinsic
def call_push(typingctx, function, centre, local, own, stride, hyper, delta, count):
    """Calls a rule's compiled push by its address."""

    def codegen(context, builder, signature, args):
        byte = _I8.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte, byte, byte, _I64, byte, byte, _I64])
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        centre, local, own, hyper, delta = (builder.inttoptr(args[i], byte) for i in (1, 2, 3, 5, 6))
        builder.call(callee, [centre, local, own, args[4], hyper, delta, args[7]])
        return context.get_dummy_value()

    u, i = types.uintp, types.int64
    return types.void(u, u, u, u, i, u, u, i), codegen


@intrinsic
def call_pull(typingctx, function, centre, local, own, stride, hyper, count):
    """Calls a rule's compiled pull by its address."""

    def codegen(context, builder, signature, args):
        byte = _I8.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte, byte, byte, _I64, byte, _I64])
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        centre, local, own, hyper = (builder.inttoptr(args[i], byte) for i in (1, 2, 3, 5))
        builder.call(callee, [centre, local, own, args[4], hyper, args[6]])
        return context.get_dummy_value()

    u, i = types.uintp, types.int64
    return types.void(u, u, u, u, i, u, i), codegen


_int, _address = types.intc, types.uintp
_syscall = types.ExternalFunction(
    "syscall",
    typing.signature(
        types.int64, types.int64, _address, types.int64, types.int64, _address, types.int64, types.int64
    ),
)
_errno_location = types.ExternalFunction("__errno_location", typing.signature(_address))
sched_yield = types.ExternalFunction("sched_yield", typing.signature(_int))
clock_gettime = types.ExternalFunction("clock_gettime", typing.signature(_int, _int, _address))
mutex_trylock = types.ExternalFunction("pthread_mutex_trylock", typing.signature(_int, _address))
mutex_clocklock = types.ExternalFunction(
    "pthread_mutex_clocklock", typing.signature(_int, _address, _int, _address)
)
mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", typing.signature(_int, _address))
mutex_consistent = types.ExternalFunction("pthread_mutex_consistent", typing.signature(_int, _address))
