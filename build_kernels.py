"""Compiles all kernels into shared libraries: a hook of hatchling's, for wheels, and a program.

python build_kernels.py FOLDER [LEVEL ...]

One library for each level of processor of this machine, or of MULTIVERSO_BUILD_MACHINE (x86_64 or aarch64; wants the
linker of that one, as binutils-aarch64-linux-gnu is), and a manifest that says which sources each group of kernels was
made of. The libraries need nothing but libc and the Python that opens them. Two builds with the same Numba give the
same bytes: the groups of a dtype are always translated one after another by one process.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_ROOT = Path(__file__).resolve().parent
_GLIBC = "2_17"  # as old as Python's own wheels go: nothing newer is called
_MACHINE = os.environ.get("MULTIVERSO_BUILD_MACHINE") or platform.machine()
_LINKER = "ld" if platform.machine() == _MACHINE else f"{_MACHINE}-linux-gnu-ld"
_LINK = (_LINKER, "-shared", "-s", "-z", "text", "-z", "noexecstack", "-z", "relro", "-z", "now", "--build-id=none")

Group = tuple[str, str | None]
"""The name of a module of kernels, or of loops of updaters or rules, and the dtype of its tables, if any."""


class DependenciesHook(MetadataHookInterface):
    """Adds Numba to the dependencies unless ``MULTIVERSO_BUILD_KERNELS`` is set.

    So `pip install .` in a clone brings what compiles kernels when they are needed, and takes no minutes itself.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Completes the table ``[project]``."""
        compiling = [] if os.environ.get("MULTIVERSO_BUILD_KERNELS") else metadata["optional-dependencies"]["compile"]
        metadata["dependencies"] = [*self.config["dependencies"], *compiling]
        metadata["gui-scripts"] = {}


class KernelsHook(BuildHookInterface[Any]):
    """Puts the libraries into a wheel where ``MULTIVERSO_BUILD_KERNELS`` is set."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles in a process of its own, which has none of the builder's settings."""
        self._folder = tempfile.TemporaryDirectory()
        if version == "editable" or not os.environ.get("MULTIVERSO_BUILD_KERNELS"):
            return
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "PYTHON"))}
        subprocess.run([sys.executable, __file__, self._folder.name], env=kept, check=True)
        build_data["force_include"][self._folder.name] = "multiverso/compiling/libraries"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{_GLIBC}_{_MACHINE}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what lay beside the wheel."""
        self._folder.cleanup()


def everything() -> list[Group]:
    """Returns all groups that multiverso itself uses."""
    from multiverso.cli import warmup

    return [*warmup.everything(), ("multiverso.bench.limits", "float32")]


def build(folder: Path, groups: Sequence[Group], levels: Sequence[str]) -> None:
    """Makes the libraries and their manifest.

    Args:
        folder: where they are put; it is there.
        groups: what goes into each.
        levels: of processors, see ``multiverso.compiling.prebuilt.LEVELS``.
    """
    from multiverso.compiling.functions import PYTHON_FACTS
    from multiverso.compiling.prebuilt import MANIFEST

    dtypes = list(dict.fromkeys(dtype for *_, dtype in groups))
    shares = [[group for group in groups if group[1] == dtype] for dtype in dtypes]
    with tempfile.TemporaryDirectory() as objects:
        cores = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(min(cores, len(shares)), mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_compile, shares, [levels] * len(shares), [objects] * len(shares)))
        digests = dict(sorted(pair for part, _ in parts for pair in part.items()))
        symbols = [PYTHON_FACTS, *sorted(symbol for _, part in parts for symbol in part)]
        exported = Path(objects, "exported")
        exported.write_text("{ global: " + " ".join(f'"{symbol}";' for symbol in symbols) + " local: *; };\n")
        for level in levels:
            _write_facts(Path(objects, f"{level}.facts.o"), level)
            files = sorted(str(path) for path in Path(objects).glob(f"{level}.*.o"))
            library = str(folder / f"{level}.so")
            subprocess.run([*_LINK, f"--version-script={exported}", "-o", library, *files], check=True)
    manifest = {"machine": _MACHINE, "groups": digests}
    (folder / MANIFEST).write_text(json.dumps(manifest) + "\n")


def _compile(share: Sequence[Group], levels: Sequence[str], objects: str) -> tuple[dict[str, str], list[str]]:
    """Writes the object files of some groups; returns the digest of each group's sources, and all functions."""
    prepare()
    from multiverso.compiling import compiler, on_demand, sources
    from multiverso.compiling.declared import group_of

    digests: dict[str, str] = {}
    symbols: list[str] = []
    for name, dtype in share:
        translated = compiler.translate(name, dtype)
        group = group_of(name, dtype)
        for level in levels:
            Path(objects, f"{level}.{group}.o").write_bytes(compiler.emit(translated, machine_of(level)))
        symbols += translated.symbols
        digests[group] = sources.digest_of(on_demand.sources_behind(name))
    return digests, symbols


def prepare() -> None:
    """Before anything else of multiverso: what is translated in this process is for any processor of the machine."""
    # Numba's own optimising would be for this processor; `compiler.optimise` does all of it, for each level.
    os.environ.update(NUMBA_OPT="0", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", NUMBA_DISABLE_JIT="0")
    import numba  # noqa: F401  # which has to see what it runs on

    platform.machine = lambda: _MACHINE  # our own modules know system calls by their numbers


def machine_of(level: str) -> Any:
    """Returns what LLVM compiles for: a level of :data:`multiverso.compiling.prebuilt.LEVELS`."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(f"{_MACHINE}-unknown-linux-gnu")
    cpu, features = (level, "") if _MACHINE == "x86_64" else ("generic", "+" + level.removeprefix("arm"))
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="default")


def _write_facts(file: Path, level: str) -> None:
    """Writes the object file of what ``prebuilt.py`` sets once a library has been opened."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from multiverso.compiling.functions import PYTHON_FACTS

    module = ir.Module()
    facts = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(64), 2), PYTHON_FACTS)
    facts.initializer = ir.Constant(facts.value_type, None)
    file.write_bytes(machine_of(level).emit_object(llvm.parse_assembly(str(module))))


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT / "src"))
    os.environ["PYTHONPATH"], os.environ["PYTHONHASHSEED"] = str(_ROOT / "src"), "0"
    from multiverso.compiling.prebuilt import LEVELS

    build(Path(sys.argv[1]), everything(), sys.argv[2:] or list(LEVELS[_MACHINE]))
