"""Compiles a module of kernels, or a loop, to object code that needs libc, a few functions of Python, and no Numba.

What Python calls is generated for each kernel: it checks and reads the arguments (of an array its address and its
size), releases the GIL, and calls the kernel. That takes about as long as a call of ``len``, a fifth of what Numba's
own dispatcher takes.

Only public parts of Numba are used: the optimised LLVM of a ``cfunc``, and its name.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, int64, njit, types

from multiverso.compiling import from_python, linking, native
from multiverso.compiling.declared import ATOMICS, LOOPS, Declared, declared_in, group_of, rebound

_OPTIONS = {"error_model": "numpy"}  # as NumPy: nothing raises, so no Python is needed to report it
# Inner functions are called by compiled code alone: what Python and C would call takes a third of the time.
_INNER_OPTIONS = {**_OPTIONS, "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_names: dict[str, dict[str, Any]] = {}
_replaced: dict[int, Any] = {}  # both kept: kernels of several modules share what they call

linking.provide()  # Numba links each function into this process


@dataclass(frozen=True)
class Translated:
    """A group of kernels as LLVM, which no processor has been chosen for.

    Attributes:
        symbols: the functions that are called from outside.
        bitcode: the module.
    """

    symbols: tuple[str, ...]
    bitcode: bytes


def translate(name: str, dtype: str | None) -> Translated:
    """Returns what a module declares: all kernels for a dtype or (None) for none, or all loops over pointers.

    Args:
        name: the module, of kernels or of updaters or rules.
        dtype: of the tables.
    """
    declared = declared_in(importlib.import_module(name), dtype)
    symbols = tuple(f"{group_of(name, dtype)}.{each}" for each in declared)
    parts = []
    for symbol, function in zip(symbols, declared.values(), strict=True):
        compiled = _compile_kernel(function, dtype) if isinstance(function, Declared) else compile_loop(function, dtype)
        parts.append(_renamed(compiled.inspect_llvm(), compiled.native_name, symbol))
    return Translated(symbols, _linked(parts))


def compile_loop(function: Callable[..., None], dtype: str | None) -> Any:
    """Compiles a loop over pointers of ``dtype`` (p) and numbers (n)."""
    kinds = {"p": types.CPointer(from_dtype(np.dtype(dtype))), "n": int64}
    taken = LOOPS.get(function.__code__.co_argcount)
    if taken is None:
        raise TypeError(f"{function.__qualname__} takes {function.__code__.co_argcount} arguments; a loop takes 6 or 7")
    return cfunc(types.void(*(kinds[kind] for kind in taken)), **_OPTIONS)(_with_inner_loops(function))


def _with_inner_loops(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a function made by another one, with the loops that it has from there in a form that Numba calls."""
    cells = tuple(
        CellType(njit(cell.cell_contents, **_OPTIONS)) if isinstance(cell.cell_contents, FunctionType) else cell
        for cell in function.__closure__ or ()
    )
    if not cells or not isinstance(function, FunctionType):
        return function
    return FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)


def _replacement(value: Any) -> Any:
    if isinstance(value, FunctionType):
        if value.__module__ == ATOMICS:
            return getattr(native, value.__name__, value)
        return njit(**_INNER_OPTIONS)(value)
    return value


def _compile_kernel(kernel: Declared[..., Any], dtype: str | None) -> Any:
    """Compiles a kernel as what Python calls (METH_FASTCALL)."""
    parameters, name = kernel.parameters(), kernel.__name__
    names = {**vars(from_python), "__name__": kernel.__module__}
    names["kernel"] = rebound(kernel.__module__, _replacement, _names, _replaced)[name]
    lines: list[str] = []
    values = []

    def check(condition: str, message: str) -> None:
        text = f"text{len(names)}"
        names[text] = from_python.text(message)
        lines.extend([f"if {condition}:", f"    return refuse({text}())"])

    taken = ", ".join(parameter for parameter, _ in parameters)
    check(f"number != {len(parameters)}", f"{name} takes {len(parameters)} arguments: {taken}")
    for place, (parameter, kind) in enumerate(parameters):
        value = f"value{place}"
        lines.append(f"{value} = word(given + {8 * place})")
        if kind in ("data", "words"):
            shape, of = ("flat or two-dimensional", np.dtype(dtype)) if kind == "data" else ("flat", np.dtype(np.int64))
            # int64 is C's long and its long long: two numbers for one dtype
            numbers = [np.dtype(char).num for char in np.typecodes["All"] if np.dtype(char) == of]
            dimensions = 2 if kind == "data" else 1
            lines.append(f"size{place} = size_of({value}, {min(numbers)}, {max(numbers)}, {dimensions})")
            check(f"size{place} < 0", f"{name}: {parameter} has to be a {shape}, contiguous, aligned {of} array")
            names[f"dtype{place}"] = of.type
            values.append(f"carray(pointer_at(word({value} + object_head())), (size{place},), dtype{place})")
        elif kind == "object":
            values.append(f"uintp({value})")
        else:
            lines += [f"number{place} = PyLong_AsLongLong({value})"]
            lines += [f"if number{place} == -1 and PyErr_Occurred() != 0:", "    return 0"]
            values.append({"address": "uintp({})", "int32": "int32({})"}.get(kind, "{}").format(f"number{place}"))
    call = f"kernel({', '.join(values)})"
    lines.append(f"answer = {call}" if kernel.answers else call)
    if all(kind != "object" for _, kind in parameters):  # which only who has the GIL may look at
        lines[-1:] = ["thread = PyEval_SaveThread()", lines[-1], "PyEval_RestoreThread(thread)"]
    names["nothing"] = from_python.text("")
    lines.append("return " + ("PyLong_FromLongLong(answer)" if kernel.answers else "Py_BuildValue(nothing())"))
    # Numba has no other way to a call whose number of arguments varies.
    exec(f"def {name}(itself, given, number):\n" + "".join(f"    {line}\n" for line in lines), names)
    return cfunc(int64(int64, int64, int64), **_OPTIONS)(names[name])


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


def emit(translated: Translated, machine: Any) -> bytes:
    """Optimises a group of kernels, checks that nothing unknown is needed, and compiles it for a processor.

    Returns:
        An ELF object.
    """
    whole = optimise(translated, machine)
    needed = {f.name for f in whole.functions if f.is_declaration and not f.name.startswith("llvm.")}
    needed |= {g.name for g in whole.global_variables if g.is_declaration}
    if unknown := needed - linking.KNOWN:
        raise RuntimeError(f"compiled kernels {translated.symbols} need {sorted(unknown)}, which they must not")
    whole.verify()
    content: bytes = machine.emit_object(whole)
    return content


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
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
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
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
