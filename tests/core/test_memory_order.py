"""The order of memory on AArch64: every ordered access of the source is in the machine code that is shipped.

Of x86-64 this would show little, where plain moves are ordered loads and stores already, and running code shows
nothing on any machine. So the kernels are compiled for AArch64 here, and counted function by function.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The words of each protocol: publications; with `make order` (up to half a minute each) also barriers and waits,
# readers that are no workers, stripes, rounds and rows of keys.
MODULES = {"multiverso.kernels.publications": None}
if "MULTIVERSO_TEST_WHOLE" in os.environ:
    MODULES |= {
        "multiverso.kernels.waits": None,
        "multiverso.kernels.read_only": None,
        "multiverso.kernels.dense": "float32",
        "multiverso.kernels.rounds.calls": "float32",
        "multiverso.kernels.keyed.calls": None,
    }
ORDERED = {"load", "store", "change", "fence"}
COUNTS = f"""
import collections, json, re, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "core")!r}]
import build_kernels
build_kernels.prepare()
from multiverso.compiling import compiler

IN_LLVM = {{
    "load": re.compile(r"= load atomic .* (?:acquire|seq_cst)"),
    "store": re.compile(r"store atomic .* (?:release|seq_cst)"),
    "change": re.compile(r"= (?:atomicrmw|cmpxchg) .* seq_cst"),
    "fence": re.compile(r"fence (?:acquire|release|seq_cst)"),
    "unordered": re.compile(r"(?:load|store|atomicrmw|cmpxchg) .*(?:unordered|monotonic)"),
}}
IN_ARM = {{
    "load": re.compile(r"lda(?:r|pr)\\s"),
    "store": re.compile(r"stlr\\s"),
    "change": re.compile(r"(?:casal|ldaddal|swpal|ldsetal|ldclral)\\s"),
    "fence": re.compile(r"dmb\\s"),
    "unordered": re.compile(r"(?:cas|ldadd|swp|ldset|ldclr)(?:a|l)?\\s"),
}}

def counts(text, begins, patterns):
    found, name = collections.defaultdict(collections.Counter), ""
    for line in text.splitlines():
        begin = re.match(begins, line)
        name = begin[1].strip('"') if begin else name
        for kind, pattern in patterns.items():
            found[name][kind] += bool(pattern.match(line.strip()) if patterns is IN_ARM else pattern.search(line))
    return found

module, dtype = sys.argv[1], sys.argv[2] or None
machine = build_kernels.machine_of("armv8.1a")
whole = compiler.optimise(compiler.translate(module, dtype), machine)
meant = counts(str(whole), r'define .*?@("[^"]+"|[^(]+)\\(', IN_LLVM)
made = counts(machine.emit_assembly(whole), r'^("[^"]+"|[^.\\s"#/][^:]*):', IN_ARM)
print(json.dumps([{{name: (meant[name], made[name]) for name in meant if sum(meant[name].values())}}, list(made)]))
"""


def counted(module: str, dtype: str | None) -> tuple[dict[str, tuple[dict[str, int], dict[str, int]]], list[str]]:
    """For each function of a module: what LLVM was given and what it made of it; and all functions that it made."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MULTIVERSO_BUILD_MACHINE": "aarch64"}
    command = [sys.executable, "-c", COUNTS, module, dtype or ""]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    functions, made = json.loads(done.stdout)
    return functions, made


def test_each_access_is_an_ordered_instruction() -> None:
    functions, _ = counted("ordered_kernels", None)
    for kernel, kind in (("loads", "load"), ("stores", "store"), ("changes", "change"), ("fences", "fence")):
        plain = next(got for name, (_, got) in functions.items() if f"{kernel}" in name)
        assert plain[kind] >= 3, functions  # more where LLVM doubles the end of a function after two checks


@pytest.mark.parametrize("module", list(MODULES))
def test_every_ordered_access_is_in_the_code_for_aarch64(module: str) -> None:
    functions, made = counted(module, MODULES[module])
    assert functions
    for name, (meant, got) in functions.items():
        assert name in made
        assert meant["unordered"] == got["unordered"] == 0, name
        for kind in ORDERED:
            # equal ends of two branches become one, or one end two: by a few at most, and never by all
            assert abs(meant[kind] - got[kind]) <= 1 + meant[kind] // 10, (name, kind, meant, got)
            assert (meant[kind] == 0) == (got[kind] == 0), (name, kind, meant, got)
