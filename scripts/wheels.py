"""Builds the wheel and the source archive, and tries them in an empty environment without Numba; prints JSON.

python scripts/wheels.py [--once] [--tests] [FOLDER]
python scripts/wheels.py --wheel FILE [--tests] [--python PYTHON ...]

The wheel is built twice, which has to give the same bytes. Needs the development tools of .venv (Numba, hatchling) and
a linker (binutils); with --wheel it builds nothing and needs nothing. Exits with 1 where anything fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Of the core, what has most to do with compiled code and with what CPython and NumPy look like inside.
TESTS = ("table_calls", "rounds", "keyed", "plain_arrays", "saving", "limits", "compiling")
# What every table, updater and rule has to do, of which the golden traces are stored to the last bit.
SUITES = ("rules/test_golden_traces.py", "testing/test_suites.py")
FACTS = """
import json, platform, numpy
from multiverso.compiling import prebuilt
levels = list(prebuilt.LEVELS[platform.machine()])
levels = levels[levels.index(prebuilt.level()):]
print(json.dumps({"machine": platform.machine(), "levels": levels, "numpy": numpy.__version__}))
"""
NOT_OURS = ("pip", "setuptools", "_distutils_hack", "pkg_resources", "distutils-precedence", "numpy")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Runs a program without what this process's own environment sets for Python; returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, **variables}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))} has failed with {done.returncode}")
    return done.stdout


def seconds_of(*command: str | Path, **more: Any) -> float:
    """Returns how long a program takes."""
    began = time.perf_counter()
    run(*command, **more)
    return round(time.perf_counter() - began, 2)


def build(folder: Path, target: str) -> Path:
    """Builds a wheel with kernels, or the source archive."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder)
    run(*command, MULTIVERSO_BUILD_KERNELS="1" if target == "wheel" else "")
    return max(folder.glob("*.whl" if target == "wheel" else "*.tar.gz"), key=lambda path: path.stat().st_mtime)


def megabytes(paths: Sequence[Path]) -> float:
    """Returns what files and folders take, altogether."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)


def built(target: Path, once: bool) -> dict[str, Any]:
    """Builds the wheel, twice unless ``once``, and the source archive; returns what they are."""
    began = time.perf_counter()
    wheel = build(target, "wheel")
    facts: dict[str, Any] = {"wheel": wheel.name, "build_seconds": round(time.perf_counter() - began, 1)}
    facts["wheel_megabytes"] = megabytes([wheel])
    facts["sdist"] = build(target, "sdist").name
    with zipfile.ZipFile(wheel) as opened:
        facts["library_kilobytes"] = {
            Path(file.filename).stem: file.file_size // 1000
            for file in opened.infolist()
            if file.filename.endswith(".so")
        }
    if not once:
        with tempfile.TemporaryDirectory() as again:
            digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, build(Path(again), "wheel"))]
        facts["same_bytes_again"] = digests[0] == digests[1]
    return facts


def tried(wheel: Path, python: str, tests: bool) -> dict[str, Any]:
    """Installs a wheel into an empty environment, and runs the README's twenty lines and tests there."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run(python, "-m", "venv", folder / "venv")
        inside = folder / "venv" / "bin" / "python"
        install: tuple[str | Path, ...] = (inside, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        facts: dict[str, Any] = {
            "python": run(inside, "-c", "import platform; print(platform.python_version())").strip()
        }
        facts["install_seconds"] = seconds_of(*install, wheel)
        packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
        facts["megabytes_beyond_numpy"] = megabytes([p for p in packages.iterdir() if not p.name.startswith(NOT_OURS)])
        run(inside, "-m", "pip", "check")
        absent = "import importlib.util as u; assert not u.find_spec('numba') and not u.find_spec('llvmlite')"
        run(inside, "-c", absent)
        facts |= json.loads(run(inside, "-c", FACTS))
        levels = facts.pop("levels")
        facts["kernels"] = levels[0]
        (block,) = re.findall(r'```python title="train.py"\n(.*?)```', (ROOT / "README.md").read_text(), re.S)
        (folder / "train.py").write_text(block)
        job = (folder / "venv" / "bin" / "multiverso", "run", "-n", "4", folder / "train.py")
        nowhere = {"cwd": folder, "HOME": "/proc", "XDG_CACHE_HOME": "/proc", "MULTIVERSO_CACHE_DIR": "/proc"}
        facts["first_run_seconds"], facts["second_run_seconds"] = (seconds_of(*job, **nowhere) for _ in range(2))
        if tests:  # which have updaters of their own, so Numba beside the kernels that came compiled
            run(*install, f"{wheel}[compile]", "pytest>=8", "pytest-timeout", "hypothesis", "greenlet", "twine>=6")
            run(inside, "-m", "twine", "check", "--strict", *wheel.parent.glob("multiverso-*"))
            path = f"{folder}/venv/bin:{os.environ['PATH']}"
            command: tuple[str | Path, ...] = (inside, "-m", "pytest", "-q", "-p", "no:cacheprovider")
            best, *others = (packages / f"multiverso/compiling/libraries/{level}.so" for level in levels)
            files = [ROOT / "tests" / "core" / f"test_{name}.py" for name in TESTS]
            facts["tests"] = run(*command, *files, PATH=path).splitlines()[-1]
            for library in [best, *others]:
                best.write_bytes(library.read_bytes())
                run(*command, *(ROOT / "tests" / name for name in SUITES), PATH=path)
            facts["kernels"] = ", ".join(levels)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--once", action="store_true", help="build it once, and do not compare")
    parser.add_argument("--tests", action="store_true", help="run tests of the core there, too")
    parser.add_argument("--python", action="append", help="which Pythons (may be given again); this one by default")
    parser.add_argument("--wheel", type=Path, help="try this one, and build none")
    given = parser.parse_args()
    facts = {"wheel": given.wheel.name} if given.wheel else built(given.folder, given.once)
    wheel = given.wheel or given.folder / facts["wheel"]
    facts["tried"] = [tried(wheel, python, given.tests) for python in given.python or [sys.executable]]
    print(json.dumps(facts, indent=1))
    sys.exit(not facts.get("same_bytes_again", True))


if __name__ == "__main__":
    main()
