"""Kernels are compiled once, kept as object code, linked without Numba, and refuse what they cannot take."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_kernels

from multiverso import kernels, updaters
from multiverso.cli import warmup
from multiverso.compiling import compiler, object_cache, on_demand
from multiverso.compiling.declared import declared_in, rebound
from multiverso.compiling.declaring import Kernel
from multiverso.compiling.linking import KNOWN
from multiverso.kernels import dense

NAME = "small_kernels"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the test's own."""
    monkeypatch.setenv("MULTIVERSO_CACHE_DIR", str(tmp_path))
    object_cache.cache_directory.cache_clear()
    yield tmp_path / "multiverso"
    object_cache.cache_directory.cache_clear()


@pytest.fixture(scope="module")
def code() -> bytes:
    """The object code of the small kernels, for float32."""
    on_demand.ensure_all([(NAME, "float32")])
    found = object_cache.read(on_demand.file_name(NAME, "float32"))
    assert found is not None
    return found


def scale(dtype: str = "float32") -> Any:
    return small_kernels.scale.compiled(dtype)


def test_a_compiled_kernel_does_what_its_python_does() -> None:
    ids = np.array([3, 0])
    for run in (small_kernels.scale, scale()):
        data = np.arange(1, 6, dtype="f4")
        assert run(data, ids, 10, 2) == 3 + 4
        assert data.tolist() == [10, 2, 3, 40, 5]
    word = np.array([7])
    swap = small_kernels.swap_first.compiled()
    assert [swap(word.ctypes.data, 8, 9), swap(word.ctypes.data, 7, 9)] == [7, 9]
    data = np.ones(3, "f4")
    assert small_kernels.clear.compiled("float32")(data) is None
    assert not data.any()


@pytest.mark.parametrize(
    "wrong, why",
    [
        ((1, 2), "takes 4 arguments"),
        (([1.0], np.arange(1), 1, 0), "data has to be a flat or two-dimensional, contiguous, aligned float32 array"),
        ((np.ones(2), np.arange(1), 1, 0), "float32"),
        ((np.ones((2, 1, 2), "f4"), np.arange(1), 1, 0), "flat or two-dimensional"),
        ((np.array(1, "f4"), np.arange(1), 1, 0), "flat or two-dimensional"),
        ((np.ones((2, 3), "f4").T, np.arange(1), 1, 0), "contiguous"),
        ((np.ones(2, "f4"), np.zeros((1, 1), int), 1, 0), "ids has to be a flat, contiguous"),
        ((np.ones(4, "f4")[::2], np.arange(1), 1, 0), "contiguous"),
        ((np.ones(2, ">f4"), np.arange(1), 1, 0), "float32"),
        ((np.frombuffer(bytes(9), "f4", 2, 1), np.arange(1), 1, 0), "aligned"),
        ((np.ones(2, "f4"), np.arange(1, dtype="i4"), 1, 0), "ids has to be a flat, contiguous, aligned int64"),
        ((np.ones(2, "f4"), np.arange(1), "1", 0), "integer"),
        ((np.ones(2, "f4"), np.arange(1), 1.5, 0), "integer"),
    ],
)
def test_a_kernel_refuses_what_it_was_not_compiled_for(wrong: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        scale()(*wrong)


def test_a_kernel_takes_matrices_subclasses_and_both_of_cs_names_of_int64() -> None:
    class Own(np.ndarray):
        pass

    matrix = np.ones((2, 3), "f4")  # which it sees flat, to its last number
    assert scale()(matrix, np.array([1, 5]), 4, 0) == 6
    assert matrix.tolist() == [[1, 4, 1], [1, 1, 4]]
    data = np.ones(2, "f4").view(Own)
    assert scale()(data, np.array([1], "longlong"), np.int64(3), True) == 3
    assert data.tolist() == [1, 3]


def test_a_kernel_keeps_no_reference() -> None:
    data, ids = np.ones(2, "f4"), np.arange(1)
    run = scale()
    before = sys.getrefcount(data), sys.getrefcount(ids)
    for _ in range(100):
        run(data, ids, 1, 0)
        with pytest.raises(TypeError):
            run(ids, data, 1, 0)
    assert (sys.getrefcount(data), sys.getrefcount(ids)) == before


def test_object_code_needs_nothing_of_numba(code: bytes) -> None:
    assert not [name for name in KNOWN if "numba" in name.lower() or name.startswith("NRT")]
    assert b"NRT_" not in code


def test_a_damaged_file_is_noticed(cache: Path, code: bytes) -> None:
    object_cache.write("file", code)
    assert object_cache.read("file") == code
    data = (cache / "file").read_bytes()
    for damaged in (b"", data[:-1], data[:100] + b"!" + data[101:], b"something else" + data):
        (cache / "file").write_bytes(damaged)
        assert object_cache.read("file") is None


def test_code_that_cannot_be_linked_is_compiled_again(
    cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = on_demand.file_name(NAME, "float32"), on_demand.build(NAME, None)
    object_cache.write(file, other)
    monkeypatch.setattr(on_demand, "compile_beside", lambda _: object_cache.write(file, code))
    assert set(on_demand.link_group(NAME, "float32")) == {"scale", "clear"}
    assert object_cache.read(file) == code


def test_one_process_compiles_what_several_ask_for(cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = []
    monkeypatch.setattr(compiler, "translate", lambda *group: group)
    monkeypatch.setattr(compiler, "emit", lambda group, machine: emitted.append(group) or code)
    threads = [threading.Thread(target=on_demand.build, args=(NAME, "float32")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert emitted == [(NAME, "float32")]


def test_a_slow_compilation_says_that_it_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_demand, "EVERY_SECONDS", 0.01)
    on_demand.compile_beside([(NAME, None), (NAME, "float32")])
    first, *going_on, last = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"multiverso: compiling kernels, once on this machine \(2 groups on \d+ cores\) \.\.\.", first)
    assert re.fullmatch(r"multiverso: compiled in \d+\.\d s", last)
    line = r"multiverso: compiling kernels \(\d of 2 groups(, about \d+ s left)?\): \d+ s"
    assert going_on
    assert all(re.fullmatch(line, text) for text in going_on), going_on


def test_a_cache_that_others_can_write_to_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # and not what others have left in the common one
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="keeps them in .*multiverso-") as warned:
        other = object_cache.cache_directory()
    assert other is not None
    assert other != cache
    assert "others may write to it" in str(warned[0].message)


def test_who_takes_the_names_of_other_caches_makes_nobody_compile_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache.write_text("no directory")
    name = f"multiverso-{os.geteuid()}"
    for taken in (f"{name}-{number}" for number in range(1, 100)):
        (tmp_path / taken).mkdir()
        (tmp_path / taken).chmod(0o777)
    found = set()
    for _ in range(2):  # the next process finds what the first one made
        object_cache.cache_directory.cache_clear()
        with pytest.warns(RuntimeWarning, match="keeps them in"):
            found.add(object_cache.cache_directory())
    assert found == {max(tmp_path.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime_ns)}


def test_without_any_cache_kernels_are_compiled_all_the_same(
    cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache.files, "own_directory", nowhere)
    monkeypatch.setattr(on_demand, "build", lambda *_: code)
    with pytest.warns(RuntimeWarning, match="each process compiles them again"):
        assert set(on_demand.link_group(NAME, "float32")) == {"scale", "clear"}


def test_a_full_disk_keeps_nobody_from_working(cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache.files, "write_whole", nowhere)
    monkeypatch.setattr(on_demand, "await_children", lambda *_: None)
    monkeypatch.setattr(on_demand, "build", lambda *_: code)
    assert set(on_demand.link_group(NAME, "float32")) == {"scale", "clear"}


def nowhere(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_planted_link_is_not_followed(cache: Path, code: bytes, tmp_path: Path) -> None:
    target = tmp_path / "target"
    object_cache.write("file", code)
    (cache / "file").rename(target)
    (cache / "planted").symlink_to(target)
    assert object_cache.read("planted") is None


def test_where_no_child_can_be_started_it_compiles_here(
    cache: Path, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = []
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(on_demand, "build", lambda *what: here.append(what) or code)
    on_demand.ensure_all([(NAME, "float32")])
    assert here == [(NAME, "float32")]


@pytest.mark.parametrize("when", ["never", "while it compiles", "and back again"])
def test_what_was_compiled_of_a_source_that_has_changed_is_not_kept(
    cache: Path,
    code: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """Its name tells of the text that was there before, and the next process would have taken it for that."""
    source = tmp_path / "changing.py"
    source.write_text("a = 1\n")
    monkeypatch.setitem(sys.modules, "changing", SimpleNamespace(__file__=str(source)))
    file = on_demand.file_name("changing", "float32")

    def emit(*_: Any) -> bytes:
        if when != "never":
            source.write_text("a = 20\n")
        if when == "and back again":  # and it was compiled of the text between
            source.write_text("a = 1\n")
        return code

    monkeypatch.setattr(compiler, "translate", lambda *_: None)
    monkeypatch.setattr(compiler, "emit", emit)
    assert on_demand.build("changing", "float32") == code
    kept = object_cache.read(file)
    assert kept == (code if when == "never" else None)
    assert ("not kept" in capfd.readouterr().err) == (when != "never")


def test_a_child_that_hangs_is_ended(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And one that fails: what is wrong is said by compiling here."""
    monkeypatch.setattr(on_demand, "BUILD_SECONDS", 0.0)
    on_demand.compile_beside([(NAME, "float32")])
    assert object_cache.read(on_demand.file_name(NAME, "float32")) is None
    monkeypatch.setattr(on_demand, "BUILD_SECONDS", 60.0)
    broken = tmp_path / "broken.py"
    broken.write_text("nothing +\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with monkeypatch.context() as known:
        known.setitem(sys.modules, "broken", SimpleNamespace(__file__=str(broken)))
        on_demand.compile_beside([("broken", "float32")])
        assert "compiled in" not in capfd.readouterr().err
    with pytest.raises(SyntaxError):
        on_demand.build("broken", "float32")


def test_a_forked_child_does_not_keep_a_lock_that_its_parent_has_let_go(cache: Path) -> None:
    ours, theirs = os.pipe()
    with object_cache.one_at_a_time("test"):
        assert not free(cache / "test.lock")
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        assert free(cache / "test.lock")
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


def test_who_waits_for_another_process_s_compiling_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other may be stopped, or in another terminal; nothing was said for five minutes."""
    monkeypatch.setattr(object_cache, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(object_cache, "_LOCK_SECONDS", 0.3)
    with object_cache.one_at_a_time("test"), object_cache.one_at_a_time("test"):
        pass
    said = capfd.readouterr().err
    assert said.count("waiting for another process that compiles kernels (test), for 0.005 minutes at most") == 1


def free(path: Path) -> bool:
    """Whether another process could take the lock now."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


ALONE = """
import sys, numpy as np, multiverso as mv
mv.init()
table = mv.ArrayTableHandler(4, updater="sgd")
table.add(np.ones(4, "f4"))
shared = mv.rules.share(np.zeros(4, "f4"), mv.rules.easgd(0.5))
shared.exchange(np.ones(4, "f4"))
assert "numba" not in sys.modules, "Numba was imported"


def apply(values, delta, state, stride, hyper, count):
    for i in range(count):
        values[i] += 2 * delta[i]


own = mv.ArrayTableHandler(4, updater=mv.updaters.Updater("own", apply))
own.add(np.ones(4, "f4"))
print(table.get().tolist(), shared.table.get().tolist(), own.get().tolist())
"""


def test_built_in_updaters_and_rules_need_no_numba_and_users_settings_for_it_break_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-1.0, -1.0, -1.0, -1.0] [0.5, 0.5, 0.5, 0.5] [2.0, 2.0, 2.0, 2.0]\n"


def test_warming_up_compiles_every_module_of_kernels() -> None:
    folder = Path(kernels.__file__).parent
    modules_of = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    declaring = {name for name, path in modules_of.items() if "\n@kernel\n" in path.read_text()}
    assert {*warmup.OF_A_DTYPE, *warmup.OF_A_FLOAT, *warmup.OF_NONE} == declaring
    of_floats = {*warmup.OF_A_DTYPE, *warmup.OF_A_FLOAT}
    for dtype, names in (("float32", of_floats), (None, {*warmup.OF_NONE})):
        modules = {name: importlib.import_module(f"multiverso.kernels.{name}") for name in declaring}
        assert names == {name for name, module in modules.items() if declared_in(module, dtype)}
    loops = {name for name, _ in warmup.everything(["float32"])}
    assert {"multiverso.updaters.momentum", "multiverso.rules.additive", "multiverso.rules.averaging"} <= loops


def test_every_loop_of_ours_is_compiled_from_its_module() -> None:
    for make in updaters.BY_NAME.values():
        assert on_demand.is_ours(make().apply)


def test_functions_are_replaced_without_touching_their_modules() -> None:
    seen = []

    def replace(value: Any) -> Any:
        seen.append(getattr(value, "__name__", value))
        return value

    names = rebound(NAME, replace)
    assert {"scale", "_doubled", "load64"} <= set(seen)
    assert isinstance(small_kernels.scale, Kernel)
    assert names["scale"] is not small_kernels.scale.function
    assert names["scale"].__globals__["_doubled"] is names["_doubled"]
    assert dense.add.compiled("float32") is dense.add.compiled("float32")
