"""The distribution: what it ships, what importing it does; and that the net below the tests holds."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import multiverso

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SUBPACKAGES = {"torch", "keras", "jax", "theano", "theano_ext", "testing"}


def start(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100, check=False
    )


def test_one_version_everywhere() -> None:
    version = metadata.version("multiverso")
    assert version in start(str(BIN / "multiverso"), "version").stdout
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_source_archive_has_what_its_makefile_and_readme_use(tmp_path: Path) -> None:
    built = start(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    texts = [(ROOT / name).read_text() for name in ("Makefile", "README.md", "CONTRIBUTING.md", ".ci/run")]
    used = {path for text in texts for path in re.findall(r"\b(?:scripts|tests|benchmarks|examples)/[\w./-]+\w", text)}
    assert len(used) > 15
    tracked = {path for path in used if (ROOT / path).is_file()}
    assert len(tracked) > 10
    assert tracked <= names, tracked - names
    assert {"Makefile", "README.md", ".ci/run", "LICENSE", "mkdocs.yml", "tests/legacy/requirements.txt"} <= names


def test_completion_shows_the_public_names() -> None:
    code = "import multiverso as mv; mv.init; print([n for n in dir(mv) if n[:2] != '__'] == sorted(mv.__all__))"
    assert start(sys.executable, "-c", code).stdout.strip() == "True"


def test_the_wheel_has_both_packages_their_types_and_the_licence(tmp_path: Path) -> None:
    built = start(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"multiverso/__init__.py", "multiverso/py.typed", "platoon/__init__.py", "platoon/py.typed"} <= {*names}
    page = ("page.html", "page.css", "page.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE")
    assert {f"multiverso/page/{name}" for name in page} <= {*names}
    assert "multiverso_program.py" in names, "both programs begin there"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name
        for name in names
        if name.split("/")[0] not in ("multiverso", "platoon", "multiverso_program.py") and ".dist-info/" not in name
    ]


def test_whoever_asks_for_the_dependencies_gets_numba_unless_kernels_come_compiled() -> None:
    asked = sys.executable, "-m", "hatchling", "metadata"
    static = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "dependencies" not in static  # or uv would take them as they stand, without asking
    needs = [start(*asked, "dependencies", MULTIVERSO_BUILD_KERNELS=value) for value in ("", "1")]
    assert [done.returncode for done in needs] == [0, 0], needs
    clone, compiled = (json.loads(done.stdout) for done in needs)
    assert set(clone) - set(compiled) == set(static["optional-dependencies"]["compile"])
    assert set(compiled) < set(clone)


def test_a_wheel_of_the_source_archive_needs_what_one_of_the_clone_does(tmp_path: Path) -> None:
    hatchling = sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"
    assert start(*hatchling, "sdist").returncode == 0
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    needs = {}
    for compiled in "", "1":
        for root in ROOT, unpacked:  # without hooks no kernel is compiled, and the metadata is the same
            built = start(*hatchling, "wheel", cwd=root, MULTIVERSO_BUILD_KERNELS=compiled, HATCH_BUILD_NO_HOOKS="1")
            assert built.returncode == 0, built.stderr
            (wheel,) = tmp_path.glob("*.whl")
            text = zipfile.Path(wheel, f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/METADATA").read_text()
            needs[root, compiled] = set(re.findall(r"^Requires-Dist: ([^;\n]+)$", text, re.M))
        assert needs[unpacked, compiled] == needs[ROOT, compiled]
    assert needs[ROOT, ""] - needs[ROOT, "1"] == {"numba>=0.61"}


def test_importing_loads_no_framework_starts_nothing_and_reads_no_environment() -> None:
    probe = """
import os, sys, threading
read = []
class Environment(dict):
    def __getitem__(self, name): read.append(name); return super().__getitem__(name)
    def get(self, name, default=None): read.append(name); return super().get(name, default)
import numpy, numba  # what these read is theirs
os.environ = Environment(os.environ)
import multiverso
assert set(multiverso.__all__) <= set(dir(multiverso))
# names are imported when they are first asked for: here a name of each module, by as many threads at once
names = "ArrayTableHandler", "checkpoint", "current", "errors", "init", "restarts", "rules", "run", "updaters"
together, missing = threading.Barrier(len(names), timeout=60), set(names)
def ask(name):
    together.wait()
    getattr(multiverso, name)
    missing.discard(name)
threads = [threading.Thread(target=ask, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not missing
from multiverso import *
ours = ("MULTIVERSO", "OMPI", "PMI", "SLURM", "TORCHELASTIC")
assert [name for name in read if name.startswith(ours)] == [], read
assert threading.active_count() == 1
assert open(f"/proc/self/task/{os.getpid()}/children").read() == ""
heavy = {"torch", "keras", "jax", "theano", "pytensor", "mpi4py", "sklearn", "click", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    result = start(sys.executable, "-W", "error", "-c", probe)
    assert result.returncode == 0, result.stderr


def test_elsewhere_than_on_linux_it_imports_and_init_says_why_not() -> None:
    probe = """
import sys, numpy, numba, platform
import multiverso
sys.platform, platform.system = "darwin", lambda: "Darwin"
try:
    multiverso.init()
except multiverso.errors.StartupError as error:
    print(error)
"""
    result = start(sys.executable, "-c", probe)
    assert result.returncode == 0, result.stderr
    assert "Linux" in result.stdout
    assert result.stdout.count("\n") == 1


def test_the_door_defines_nothing_and_exports_what_it_says() -> None:
    door = ast.parse((ROOT / "src/multiverso/__init__.py").read_text())
    defined = [node for node in door.body if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)]
    assert [node.name for node in defined if not node.name.startswith("__")] == []
    assert len(set(multiverso.__all__)) == len(multiverso.__all__)
    assert [name for name in multiverso.__all__ if not hasattr(multiverso, name)] == []


def test_every_exported_name_has_a_docstring_and_stands_in_the_documentation() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    values = {name: getattr(multiverso, name) for name in multiverso.__all__}
    assert [name for name, value in values.items() if callable(value) and not value.__doc__] == []
    assert [name for name in values if name not in pages] == []


def test_no_outer_environment_reaches_the_makefile() -> None:
    outer = {"PYTHONPATH": "/outer", "THEANO_FLAGS": "outer", "VIRTUAL_ENV": "/outer", "MULTIVERSO_NODE": "outer"}
    result = start("make", "--no-print-directory", "--eval", "show: ; @env", "show", **outer)
    assert result.returncode == 0, result.stderr
    assert [name for name in outer if f"{name}=" in result.stdout] == []


def test_a_first_file_on_a_new_machine_needs_no_more_than_make_says() -> None:
    listed = start("make", "help").stdout
    assert [name for name in ("demo", "test", "check", "bench", "chaos", "docs") if f"make {name}" not in listed] == []


def test_the_site_of_a_version_is_built_with_no_environment_on_path(tmp_path: Path) -> None:
    """mike starts whatever mkdocs is on PATH."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for program, does in (("mike", 'mkdocs "$@"'), ("mkdocs", 'echo "mkdocs was told $1"')):
        (tmp_path / ".venv" / "bin" / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / ".venv" / "bin" / program).chmod(0o755)
    done = start("make", "-o", ".venv/.dev", "docs-version", "VERSION=1.0", cwd=tmp_path, PATH="/usr/bin:/bin")
    assert "mkdocs was told deploy" in done.stdout, done.stderr


LEAKS = """
import mmap, os, socket, subprocess, threading

import pytest

kept = []

def test_orphan():
    subprocess.run(["setsid", "--fork", "sleep", "60"], check=True)

def test_child():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, args=(60,), daemon=True).start()

def test_descriptor():
    kept.append(open("/etc/passwd"))

def test_socket():
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind("\\0multiverso-leak")

def test_mapping():
    descriptor = os.memfd_create("multiverso-leak")
    os.ftruncate(descriptor, 4096)
    kept.append(mmap.mmap(descriptor, 4096))
    os.close(descriptor)

def test_clean():
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("\\0multiverso-clean")
    threading.Timer(0.2, print).start()
    subprocess.run(["true"], check=True)

@pytest.fixture(scope="session")
def shared():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield
        process.kill()

def test_what_several_tests_share_stays(shared):
    pass
"""


def test_the_net_catches_whatever_a_test_leaves_behind(tmp_path: Path) -> None:
    net = (ROOT / "tests/conftest.py").read_text()
    (tests := tmp_path / "tests").mkdir()  # not pytest's root, as in this repository
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tests / "conftest.py").write_text(net.replace("SETTLE_SECONDS = 30.0", "SETTLE_SECONDS = 1.0"))
    (tests / "test_leaks.py").write_text(LEAKS)
    result = start(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=tmp_path)
    caught = set(re.findall(r"^ERROR tests/test_leaks.py::test_(\w+)", result.stdout, re.M))
    assert caught == {"orphan", "child", "thread", "descriptor", "socket", "mapping"}, result.stdout
    for word in ("process", "thread", "descriptor", "abstract socket @multiverso-leak", "shared memory"):
        assert f"  {word}" in result.stdout


SIGNALS = """
import signal
import subprocess

# Those below SIGRTMIN are the C library's own: nothing here can ignore, block or restore them.
OUT_OF_REACH = sum(1 << number - 1 for number in range(32, signal.SIGRTMIN))


def test_a_program_begins_with_every_signals_default():
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    signals = dict(line.split(":\\t") for line in status.splitlines() if line.startswith("Sig"))
    assert [int(signals[kind], 16) & ~OUT_OF_REACH for kind in ("SigIgn", "SigBlk")] == [0, 0]
"""


def test_what_the_caller_ignores_or_blocks_the_programs_of_a_test_do_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_signals.py").write_text(SIGNALS)
    ignoring = ["sh", "-c", "trap '' HUP INT QUIT TERM USR1 USR2 CHLD; exec \"$@\"", "sh"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGALRM})
    try:
        result = start(*ignoring, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=tmp_path)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert result.returncode == 0, result.stdout


ORDERS = re.compile(
    "(Add|Begin|Call|Check|Close|Compute|Create|Find|Get|Make|Open|Pass|Print|Read|Return|Run|Send|Set|Show|Start|"
    "Stop|Take|Tell|Wait|Write|Yield) "
)


def test_docstrings_have_one_voice() -> None:
    """They say what a function does ("Returns"), and give no orders ("Return"); help texts of commands do."""
    helping = {ROOT / "src/multiverso/cli/main.py", ROOT / "src/platoon/launcher.py"}
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in {*(ROOT / "src").rglob("*.py")} - helping
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and ORDERS.match(ast.get_docstring(node) or "")
    ]
    assert not found
