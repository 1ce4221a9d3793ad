"""Kernels of a wheel: the same bits as what Numba makes now, and taken only where they fit processor and sources."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_kernels

from multiverso.compiling import on_demand, prebuilt
from multiverso.compiling.functions import callable_at
from multiverso.compiling.sources import digest_of
from multiverso.kernels import dense

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOOPS = "multiverso.updaters.momentum"
LEVEL = "x86-64-v2"  # which every processor has that the tests run on
BUILD = f"""
import sys; sys.path[:0] = {[str(ROOT), str(HERE)]!r}
from pathlib import Path
from build_kernels import build
if __name__ == "__main__":
    groups = [("small_kernels", dtype) for dtype in ("float32", None)]
    build(Path(sys.argv[1]), [*groups, ({LOOPS!r}, "float32")], [{LEVEL!r}])
"""


def build(folder: Path) -> None:
    """Makes a library of the small kernels and of an updater."""
    if shutil.which("ld") is None:
        pytest.skip("there is no linker here (ld, of binutils), with which a wheel's kernels are linked")
    folder.mkdir()
    program = folder.parent / "program.py"
    program.write_text(BUILD)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, str(program), str(folder)], env=environment, check=True, timeout=250)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prebuilt") / "libraries"
    build(folder)
    return folder


@pytest.fixture
def opened(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process takes kernels from there, as from a wheel."""
    monkeypatch.setattr(prebuilt, "FOLDER", libraries)
    monkeypatch.setattr(prebuilt, "LEVELS", {platform.machine(): {LEVEL: set()}})
    prebuilt.open_library.cache_clear()
    yield
    prebuilt.open_library.cache_clear()


def taken_and_made(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], dict[str, int]]:
    """The addresses of a group's functions in the library, and as Numba makes them."""
    taken = on_demand.link_group(name, "float32")
    assert prebuilt.level() == LEVEL
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(prebuilt, "FOLDER", HERE / "nowhere")
        prebuilt.open_library.cache_clear()
        made = on_demand.link_group(name, "float32")
    assert set(made) == set(taken)
    assert set(made.values()).isdisjoint(taken.values())
    return taken, made


def test_a_wheels_kernels_do_bit_for_bit_what_numbas_do(opened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    both = taken_and_made("small_kernels", monkeypatch)
    taken, made = (callable_at("scale", addresses["scale"]) for addresses in both)
    random = np.random.default_rng(1)
    for kernel in (made, taken):
        with pytest.raises(TypeError, match="contiguous"):
            kernel(np.zeros(4, "f8"), np.arange(2), 1, 1)
    for _ in range(20):
        data = random.normal(size=64).astype("f4")
        ids = random.permutation(64)
        results = []
        for kernel in (made, taken, small_kernels.scale):
            copy = data.copy()
            results.append((kernel(copy, ids, 3, 7), copy.tobytes()))
        assert results[0] == results[1] == results[2]


def test_a_wheels_loops_do_bit_for_bit_what_numbas_do(opened: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, made = taken_and_made(LOOPS, monkeypatch)
    random = np.random.default_rng(2)
    for name in made:
        values, delta, *state = (random.normal(size=1001).astype("f4") for _ in range(5))
        hyper = np.full(8, 0.3, "f4")
        results = []
        for address in (made[name], taken[name]):
            copies = values.copy(), np.concatenate(state)  # three arrays, as the updater with most has
            apply(address, copies[0], delta, copies[1], hyper)
            results.append((copies[0].tobytes(), copies[1].tobytes()))
        assert results[0] == results[1] != (values.tobytes(), np.concatenate(state).tobytes())


def apply(address: int, values: Any, delta: Any, state: Any, hyper: Any) -> None:
    from multiverso.compiling.atomics import call_update

    addresses = [array.ctypes.data for array in (values, delta, state)]
    call_update(address, *addresses, values.size, hyper.ctypes.data, values.size)


def test_a_library_made_of_other_sources_is_not_used(opened: None, tmp_path: Path) -> None:
    sources = on_demand.sources_behind("small_kernels")
    digest = digest_of(sources)
    assert prebuilt.has("small_kernels-float32", digest)
    changed = tmp_path / sources[0].name
    changed.write_bytes(sources[0].read_bytes() + b"\n")
    assert not prebuilt.has("small_kernels-float32", digest_of([changed, *sources[1:]]))
    assert not prebuilt.has("dense-float32", digest)  # which it does not have


@pytest.mark.parametrize("more", [1, 2, 3])
def test_the_best_library_is_taken_that_the_processor_can_run(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    of_machine = prebuilt.LEVELS["x86_64"]
    levels = list(of_machine)[::-1]
    for level in levels:
        (tmp_path / f"{level}.so").write_bytes((libraries / f"{LEVEL}.so").read_bytes())
    (tmp_path / prebuilt.MANIFEST).write_bytes((libraries / prebuilt.MANIFEST).read_bytes())
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    flags = of_machine[levels[more - 1]] | {"fpu", "sse2"}
    for seen, level in ((flags, levels[more - 1]), (flags - {"popcnt"}, None)):
        monkeypatch.setattr(prebuilt, "processor_flags", lambda seen=seen: seen)
        prebuilt.open_library.cache_clear()
        assert prebuilt.level() == level
    prebuilt.open_library.cache_clear()


def test_two_builds_give_the_same_bytes(libraries: Path, tmp_path: Path) -> None:
    build(tmp_path / "again")
    files = sorted(path.name for path in libraries.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir()) == ["manifest.json", f"{LEVEL}.so"]
    for name in files:
        assert (libraries / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_library_needs_no_other(libraries: Path) -> None:
    listed = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(libraries / f"{LEVEL}.so")], capture_output=True, text=True, check=True
    ).stdout
    assert "TEXTREL" not in listed
    assert "NEEDED" not in listed
    groups = {"small_kernels", "small_kernels-float32", "updaters.momentum-float32"}
    assert json.loads((libraries / prebuilt.MANIFEST).read_text())["groups"].keys() == groups


def test_without_numba_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "find_numba", lambda: None)

    def double(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            values[i] += 2 * delta[i]

    for needs_it in (
        lambda: on_demand.load_loop.__wrapped__(double, "float32"),
        lambda: on_demand.load_module.__wrapped__("small_kernels", "float32"),
        lambda: on_demand.ensure_all([(dense.__name__, "float32")]),
    ):
        with pytest.raises(ModuleNotFoundError, match=r'must be compiled.*: pip install "multiverso\[compile\]"$'):
            needs_it()


def test_numba_is_looked_for_where_no_handler_of_a_signal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the middle left the import lock held: every later import waited for ever."""
    threads: list[int] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: threads.append(threading.get_ident()))
    on_demand.find_numba.cache_clear()
    try:
        assert on_demand.find_numba() is None
    finally:
        on_demand.find_numba.cache_clear()
    assert threads
    assert threading.main_thread().ident not in threads


def test_a_wheels_kernels_run_where_numba_and_llvmlite_cannot_be_imported(libraries: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(HERE)!r}); sys.modules["numba"] = sys.modules["llvmlite"] = None
from pathlib import Path
from multiverso.compiling import prebuilt
prebuilt.FOLDER = Path({str(libraries)!r}); prebuilt.LEVELS = {{{platform.machine()!r}: {{{LEVEL!r}: set()}}}}
import numpy as np, small_kernels
data = np.arange(4, dtype="f4")
assert small_kernels.scale.compiled("float32")(data, np.array([1, 3]), 10, 0) == 4
print(data.tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0.0, 10.0, 2.0, 30.0]\n", done.stderr
    assert importlib.util.find_spec("numba") is not None
