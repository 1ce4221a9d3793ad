"""Kernels are compiled once, kept as object code, linked without Numba, and refuse what they cannot take."""

from __future__ import annotations

import fcntl
import importlib
import io
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
from multiverso.compiling import object_cache, on_demand, sources
from multiverso.compiling.declared import kernels_of, rebound
from multiverso.compiling.declaring import Kernel
from multiverso.compiling.object_code import Code
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
def code() -> Code:
    """The object code of the small kernels, for float32."""
    on_demand.ensure("module", NAME, "float32")
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


def test_object_code_needs_nothing_of_numba(code: Code) -> None:
    assert set(code.names) == {f"{NAME}-float32.scale", f"{NAME}-float32.clear"}
    assert not [name for name in code.needed if "numba" in name.lower() or name.startswith("NRT")]


def test_a_damaged_file_is_noticed(code: Code) -> None:
    data = code.to_bytes()
    assert Code.from_bytes(data) == code
    for damaged in (b"", data[:-1], data[:100] + b"!" + data[101:], b"something else" + data):
        with pytest.raises(ValueError, match="damaged"):
            Code.from_bytes(damaged)


def test_code_that_cannot_be_linked_is_compiled_again(cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    file = on_demand.file_name(NAME, "float32")
    object_cache.write(file, Code(("other",), code.needed, code.content))
    monkeypatch.setattr(on_demand, "built_by_a_child", lambda *_: code)
    assert set(on_demand.link_group("module", NAME, "float32")) == {"scale", "clear"}
    assert object_cache.read(file) == code


def test_one_process_compiles_what_several_threads_ask_for(
    cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built = []

    def build(*what: Any) -> Code:
        built.append(what)
        return code

    monkeypatch.setattr(on_demand, "built_by_a_child", build)
    threads = [threading.Thread(target=on_demand.ensure, args=("module", NAME, "float32")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [("module", NAME, "float32")]
    assert capsys.readouterr().err.count("compiling kernels (small_kernels-float32)") == 1


class Terminal(io.StringIO):
    """Standard error, on a terminal or not; tells when something was written often enough."""

    def __init__(self, terminal: bool, enough: int) -> None:
        super().__init__()
        self.terminal, self.left, self.enough = terminal, enough, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if " s" in text:
            self.left -= 1
            if self.left == 0:
                self.enough.set()
        return super().write(text)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_slow_compilation_says_that_it_goes_on(
    cache: Path, code: Code, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = Terminal(terminal, 3)

    def slow(*what: Any) -> Code:
        assert errors.enough.wait(60), errors.getvalue()
        return code

    monkeypatch.setattr(on_demand, "built_by_a_child", slow)
    monkeypatch.setattr(on_demand, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", errors)
    on_demand.ensure("module", NAME, "float32")
    first, *going_on, last = errors.getvalue().splitlines()
    words = re.escape("multiverso: compiling kernels (small_kernels-float32)")
    assert re.fullmatch(words + r", once on this machine \(up to half a minute\) \.\.\.", first)
    assert re.fullmatch(r"multiverso: compiled in \d+\.\d s", last)
    line = words + r": \d+ s"
    if terminal:  # one line that is written over, and is gone in the end; the string's lines end with \r, too
        assert "\n" not in errors.getvalue().partition("...\n")[2].partition("multiverso: compiled")[0]
        assert not going_on[-1].strip()
        going_on = [text for text in going_on if text.strip()]
    assert len(going_on) >= 3
    assert all(re.fullmatch(line, text) for text in going_on), going_on


def test_a_cache_that_others_can_write_to_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # and not what others have left in the common one
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
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
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    cache.write_text("no directory")
    name = f"multiverso-{os.geteuid()}"
    for taken in (name, *(f"{name}-{number}" for number in range(1, 100))):
        (tmp_path / taken).mkdir()
        (tmp_path / taken).chmod(0o777)
    found = set()
    for _ in range(2):  # the next process finds what the first one made
        object_cache.cache_directory.cache_clear()
        with pytest.warns(RuntimeWarning, match="keeps them in"):
            found.add(object_cache.cache_directory())
    assert found == {max(tmp_path.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime_ns)}


def test_without_any_cache_kernels_are_compiled_all_the_same(
    cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache.files, "own_directory", nowhere)
    monkeypatch.setattr(on_demand, "built_by_a_child", lambda *_: code)
    with pytest.warns(RuntimeWarning, match="each process compiles them again"):
        assert set(on_demand.link_group("module", NAME, "float32")) == {"scale", "clear"}


def test_a_full_disk_keeps_nobody_from_working(cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache.files, "write_whole", nowhere)
    monkeypatch.setattr(on_demand, "built_by_a_child", lambda *_: code)
    assert set(on_demand.link_group("module", NAME, "float32")) == {"scale", "clear"}


def nowhere(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_planted_link_is_not_followed(cache: Path, code: Code, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(code.to_bytes())
    target.chmod(0o600)
    directory = object_cache.cache_directory()
    assert directory is not None
    (directory / "planted").symlink_to(target)
    assert object_cache.read("planted") is None


def test_where_no_child_can_be_started_it_compiles_here(
    cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = []
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(on_demand, "_built_here", lambda *what: here.append(what) or code)
    on_demand.ensure("module", NAME, "float32")
    assert here == [("module", NAME, "float32")]


@pytest.mark.parametrize("when", ["never", "while it compiles", "once the compiler has begun"])
def test_what_was_compiled_of_a_source_that_has_changed_is_not_kept(
    cache: Path,
    code: Code,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    when: str,
) -> None:
    """Its name tells of the text that was there before, and the next process would have taken it for that."""
    source = tmp_path / "changing.py"
    source.write_text("a = 1\n")
    compiler: Any = SimpleNamespace(stamps=sources.stamps_of([source]), build=lambda *_: code)
    monkeypatch.setitem(sys.modules, "changing", SimpleNamespace(__file__=str(source)))
    if when == "once the compiler has begun":  # it may have imported the text before
        source.write_text("a = 20\n")
    if when == "while it compiles":
        compiler.build = lambda *_: source.write_text("a = 20\n") and code
    on_demand.ensure("module", "changing", "float32", compiler)
    kept = object_cache.read(on_demand.file_name("changing", "float32"))
    assert kept == (code if when == "never" else None)
    assert ("not kept" in capfd.readouterr().err) == (when != "never")


def test_a_child_that_hangs_is_ended(cache: Path, code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that fails: what is wrong is said by compiling here."""
    monkeypatch.setattr(on_demand, "BUILD_SECONDS", 0.0)
    assert on_demand.built_by_a_child("module", NAME, "float32") is None
    monkeypatch.setattr(on_demand, "BUILD_SECONDS", 60.0)
    assert on_demand.built_by_a_child("module", "no_such_module", "float32") is None


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
        assert names == {name for name, module in modules.items() if kernels_of(module, dtype)}
    loops = {name for kind, name, _ in warmup.everything(["float32"]) if kind == "loops"}
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
