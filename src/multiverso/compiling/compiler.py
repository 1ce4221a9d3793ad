"""Compiles a module of kernels, or a loop, to object code that needs libc, a few functions of Python, and no Numba.

Each kernel becomes a plain C function over addresses and numbers (an array is its address and its size), and beside
it stands what Python calls: it checks and reads the arguments, releases the GIL, and calls the C function. That
takes about as long as a call of ``len``, a fifth of what Numba's own dispatcher takes.

Only public parts of Numba are used: the optimised LLVM of a ``cfunc``, and its name.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, int32, int64, njit, types, uintp

from multiverso.compiling import native
from multiverso.compiling.declared import ATOMICS, Declared, kernels_of, rebound
from multiverso.compiling.functions import PYTHON_FACTS_HERE
from multiverso.compiling.object_code import LIBC, LOOPS, PYTHON, PYTHON_FACTS, Code, group_of, is_loop

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_C_CONTIGUOUS_AND_ALIGNED = 0x101
_SWAPPED = ord(">")
_OPTIONS = {"error_model": "numpy"}  # as NumPy: nothing raises, so no Python is needed to report it
# Inner functions are called by compiled code alone: what Python and C would call takes a third of the time.
_INNER_OPTIONS = {**_OPTIONS, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_names: dict[str, dict[str, Any]] = {}
_replaced: dict[int, Any] = {}  # both kept: kernels of several modules share what they call

llvm.add_symbol(PYTHON_FACTS, ctypes.addressof(PYTHON_FACTS_HERE))  # Numba links each function into this process


@dataclass(frozen=True)
class Translated:
    """A group of kernels as LLVM, which no processor has been chosen for.

    Attributes:
        symbols: the functions that are called from outside.
        bitcode: the module.
    """

    symbols: tuple[str, ...]
    bitcode: bytes


def translate(kind: str, name: str, dtype: str | None) -> Translated:
    """Returns what a module declares: all kernels for a dtype or (None) for none, or all loops over pointers.

    Args:
        kind: ``"module"`` of kernels, or ``"loops"`` of updaters or rules.
        name: the module.
        dtype: of the tables.
    """
    module, group = importlib.import_module(name), group_of(name, dtype)
    if kind == "loops":
        loops = {key: value for key, value in vars(module).items() if is_loop(value, name)}
        symbols = tuple(f"{group}.{key}" for key in loops)
        compiled = [compile_loop(function, str(dtype)) for function in loops.values()]
        parts = [_renamed(c.inspect_llvm(), c.native_name, symbol) for c, symbol in zip(compiled, symbols, strict=True)]
        return Translated(symbols, _linked(parts))
    declared = kernels_of(module, dtype)
    names = rebound(name, _replacement, _names, _replaced)
    entries = [_Entry(kernel, names[kernel.__name__], group, dtype) for kernel in declared]
    trampolines = ir.Module()
    for entry in entries:
        entry.add_trampoline(trampolines)
    parts = [entry.llvm for entry in entries]
    return Translated(tuple(entry.symbol for entry in entries), _linked([*parts, str(trampolines)]))


def compile_loop(function: Callable[..., None], dtype: str) -> Any:
    """Compiles a loop over pointers of ``dtype`` (p) and numbers (n)."""
    kinds = {"p": types.CPointer(from_dtype(np.dtype(dtype))), "n": int64}
    if not _kinds(function):
        raise TypeError(f"{function.__qualname__} takes {function.__code__.co_argcount} arguments; a loop takes 6 or 7")
    signature = types.void(*(kinds[kind] for kind in _kinds(function)))
    return cfunc(signature, **_OPTIONS)(_with_inner_loops(function))


def _with_inner_loops(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function made by another one, with the loops that it has from there in a form that Numba calls."""
    cells = tuple(
        CellType(njit(cell.cell_contents, **_OPTIONS)) if isinstance(cell.cell_contents, FunctionType) else cell
        for cell in function.__closure__ or ()
    )
    if not cells or not isinstance(function, FunctionType):
        return function
    return FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)


def _kinds(function: Callable[..., None]) -> str:
    return LOOPS.get(function.__code__.co_argcount, "")


def _replacement(value: Any) -> Any:
    if isinstance(value, FunctionType):
        if value.__module__ == ATOMICS:
            return getattr(native, value.__name__, value)
        return njit(**_INNER_OPTIONS)(value)
    return value


class _Entry:
    """One kernel: its C function, and what Python calls."""

    def __init__(self, kernel: Declared[..., Any], dispatcher: Any, group: str, dtype: str | None) -> None:
        self.name = kernel.__name__
        self.symbol = f"{group}.{self.name}"
        self.parameters = kernel.parameters()
        self.answers = kernel.answers
        self.dtype = dtype
        self.types = [kind for _, parameter in self.parameters for kind in _PASSED[parameter]]
        arguments, values = [], []
        for name, kind in self.parameters:
            if kind in ("data", "words"):
                arguments += [f"{name}_at", f"{name}_size"]
                values.append(f"carray(pointer_at({name}_at), ({name}_size,), {kind}_dtype)")
            else:
                arguments.append(name)
                values.append(name)
        source = f"def {self.name}({', '.join(arguments)}):\n    return kernel({', '.join(values)})\n"
        names = {
            "kernel": dispatcher,
            "carray": carray,
            "pointer_at": native.pointer_at,
            "words_dtype": np.int64,
            "data_dtype": np.dtype(dtype).type,
        }
        exec(source, names)  # Numba has no other way to a function whose number of arguments varies
        signature = (int64 if self.answers else types.void)(*self.types)
        compiled = cfunc(signature, **_OPTIONS)(names[self.name])
        self.plain = f"plain.{self.symbol}"
        self.llvm = _renamed(compiled.inspect_llvm(), compiled.native_name, self.plain)

    def add_trampoline(self, module: ir.Module) -> None:
        """Adds the function that Python calls (METH_FASTCALL) to a module."""
        function = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64, _I64]), self.symbol)
        builder = ir.IRBuilder(function.append_basic_block())
        head = _load(builder, _global(module, PYTHON_FACTS), 8, _I64)
        _, given, number = function.args

        def call(name: str, result: Any, *arguments: Any, variadic: bool = False) -> Any:
            callee = module.globals.get(name) or ir.Function(
                module, ir.FunctionType(result, [argument.type for argument in arguments], var_arg=variadic), name
            )
            return builder.call(callee, arguments)

        def refuse_unless(condition: Any, message: str) -> None:
            with builder.if_then(builder.not_(condition), likely=False):
                text = self._text(module, message)
                error = builder.load(builder.inttoptr(_global(module, "PyExc_TypeError"), _I64.as_pointer()))
                call("PyErr_SetString", ir.VoidType(), error, text)
                builder.ret(_I64(0))

        refuse_unless(
            builder.icmp_signed("==", number, _I64(len(self.parameters))),
            f"{self.name} takes {len(self.parameters)} arguments: {', '.join(n for n, _ in self.parameters)}",
        )
        arguments = []
        for position, (name, kind) in enumerate(self.parameters):
            value = _load(builder, given, 8 * position, _I64)
            if kind == "object":
                arguments.append(value)
                continue
            if kind in ("data", "words"):
                dtype = "int64" if kind == "words" else str(self.dtype)
                shape = "flat" if kind == "words" else "flat or two-dimensional"
                message = f"{self.name}: {name} has to be a {shape}, contiguous, aligned {dtype} array"
                array_type = _load(builder, _global(module, PYTHON_FACTS), 0, _I64)
                fields = builder.add(value, head)
                kept = _load(builder, fields, -8, _I64)
                is_array = builder.icmp_signed("==", kept, array_type)
                with builder.if_else(is_array, likely=True) as (yes, no):
                    with yes:
                        exact = builder.block
                    with no:
                        sub = call("PyType_IsSubtype", _I32, kept, array_type)
                        is_sub = builder.icmp_signed("!=", sub, _I32(0))
                        other = builder.block
                chosen = builder.phi(_I1)
                chosen.add_incoming(_I1(1), exact)
                chosen.add_incoming(is_sub, other)
                refuse_unless(chosen, message)
                dimensions = 1 if kind == "words" else 2
                refuse_unless(self._fits(builder, fields, head, dtype, dimensions), message)
                arguments.append(_load(builder, fields, 0, _I64))
                arguments.append(self._size(builder, fields))
                continue
            integer = call("PyLong_AsLongLong", _I64, value)
            with builder.if_then(builder.icmp_signed("==", integer, _I64(-1)), likely=False):
                failed = builder.icmp_signed("!=", call("PyErr_Occurred", _I64), _I64(0))
                with builder.if_then(failed, likely=False):
                    builder.ret(_I64(0))
            arguments.append(builder.trunc(integer, _I32) if kind == "int32" else integer)
        looks = any(kind == "object" for _, kind in self.parameters)  # which only who has the GIL may do
        thread = None if looks else call("PyEval_SaveThread", _I64)
        result_type = _I64 if self.answers else ir.VoidType()
        result = call(self.plain, result_type, *arguments)
        if thread is not None:
            call("PyEval_RestoreThread", ir.VoidType(), thread)
        if self.answers:
            builder.ret(call("PyLong_FromLongLong", _I64, result))
        else:
            builder.ret(call("Py_BuildValue", _I64, self._text(module, ""), variadic=True))

    @staticmethod
    def _size(builder: ir.IRBuilder, fields: Any) -> Any:
        """How many numbers there are in an array of one or two dimensions."""
        shape = _load(builder, fields, 16, _I64)
        flat = builder.icmp_signed("==", _load(builder, fields, 8, _I32), _I32(1))
        first = _load(builder, shape, 0, _I64)
        last = _load(builder, builder.select(flat, shape, builder.add(shape, _I64(8))), 0, _I64)
        return builder.mul(first, builder.select(flat, _I64(1), last))

    @staticmethod
    def _fits(builder: ir.IRBuilder, fields: Any, head: Any, dtype: str, dimensions: int) -> Any:
        """The fields of an array object have the same places in NumPy 1 and 2, after the head of any object."""
        beyond = builder.sub(_load(builder, fields, 8, _I32), _I32(1))
        flat = builder.icmp_unsigned("<", beyond, _I32(dimensions))
        flags = builder.and_(_load(builder, fields, 48, _I32), _I32(_C_CONTIGUOUS_AND_ALIGNED))
        plain = builder.icmp_signed("==", flags, _I32(_C_CONTIGUOUS_AND_ALIGNED))
        descr = builder.add(_load(builder, fields, 40, _I64), head)
        native_order = builder.icmp_signed("!=", _load(builder, descr, 10, _I8), _I8(_SWAPPED))
        number = _load(builder, descr, 12, _I32)
        same = _I1(0)
        # int64 is C's long and its long long: two numbers for one dtype
        for char in np.typecodes["All"]:
            if np.dtype(char) == np.dtype(dtype):
                same = builder.or_(same, builder.icmp_signed("==", number, _I32(np.dtype(char).num)))
        return builder.and_(builder.and_(flat, plain), builder.and_(native_order, same))

    def _text(self, module: ir.Module, text: str) -> Any:
        content = text.encode() + b"\0"
        name = f"text.{self.name}.{sum(1 for g in module.globals if g.startswith('text.'))}"
        constant = ir.GlobalVariable(module, ir.ArrayType(_I8, len(content)), name)
        constant.global_constant, constant.linkage = True, "internal"
        constant.initializer = ir.Constant(constant.type.pointee, bytearray(content))
        return constant.ptrtoint(_I64)


_PASSED: dict[str, tuple[Any, ...]] = {
    "address": (uintp,),
    "object": (uintp,),
    "int64": (int64,),
    "int32": (int32,),
    "words": (uintp, int64),
    "data": (uintp, int64),
}


def _load(builder: ir.IRBuilder, address: Any, offset: int, kind: Any) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer()))


def _global(module: ir.Module, name: str) -> Any:
    found = module.globals.get(name) or ir.GlobalVariable(module, _I8, name)
    return found.ptrtoint(_I64)


def _renamed(text: str, old: str, new: str) -> str:
    return text.replace(f'@"{old}"', f'@"{new}"').replace(f"@{old}(", f'@"{new}"(')


def _linked(parts: list[str]) -> bytes:
    """Links LLVM modules into one."""
    whole = llvm.parse_assembly(str(_nothing_is_counted()))
    for part in parts:
        module = llvm.parse_assembly(part)
        module.triple, module.data_layout = whole.triple, whole.data_layout
        whole.link_in(module)
    return bytes(whole.as_bitcode())


def emit(translated: Translated, machine: Any) -> Code:
    """Optimises a group of kernels, checks that nothing unknown is needed, and compiles it for a processor."""
    whole = optimise(translated, machine)
    needed = {f.name for f in whole.functions if f.is_declaration and not f.name.startswith("llvm.")}
    needed |= {g.name for g in whole.global_variables if g.is_declaration}
    unknown = needed - LIBC - PYTHON
    if unknown:
        raise RuntimeError(f"compiled kernels {translated.symbols} need {sorted(unknown)}, which they must not")
    whole.verify()
    return Code(translated.symbols, tuple(sorted(needed)), machine.emit_object(whole))


def optimise(translated: Translated, machine: Any) -> Any:
    """Returns a group of kernels as an LLVM module, optimised for a processor."""
    whole = llvm.parse_bitcode(translated.bitcode)
    whole.triple, whole.data_layout = machine.triple, str(machine.target_data)
    for function in whole.functions:
        if not function.is_declaration and function.name not in translated.symbols:
            function.linkage = "internal"
    _simplify(whole, machine)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    _simplify(whole, machine)
    return whole


def _nothing_is_counted() -> ir.Module:
    """Stands for Numba's counting of references: kernels look at memory that others own, and allocate none.

    (A kernel that does allocate is refused: it would need more of Numba than these two.)
    """
    module = ir.Module()
    for name in ("NRT_incref", "NRT_decref"):
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I8.as_pointer()]), name)
        function.attributes.add("alwaysinline")
        ir.IRBuilder(function.append_basic_block()).ret_void()
    return module


def _simplify(module: Any, machine: Any) -> None:
    """Finds out, across functions, that no kernel raises and counts no array, and drops what is then unused."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    for _ in range(2):
        passes.add_ipsccp_pass()
        passes.add_simplify_cfg_pass()
    passes.add_dead_arg_elimination_pass()
    passes.add_global_opt_pass()
    passes.add_dead_code_elimination_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))


def this_machine() -> Any:
    """Returns what code is compiled for that is linked into a process of this machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
