"""What a kernel is made of: its module and everything of ours that it imports, read without importing it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_IMPORT = re.compile(
    r"^(?:from (?P<of>multiverso[\w.]*) import (?P<names>\([^)]*\)|[^\n]+)|import (?P<modules>[^\n]+))", re.MULTILINE
)

Stamp = tuple[int, int] | None
"""When a file was last written to, in nanoseconds, and its size; None where it is gone."""


@functools.cache
def _read(path: Path) -> tuple[Stamp, bytes]:
    return _stamp(path), path.read_bytes()


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def read_all() -> None:
    """Reads all sources, before any of them is imported: what is compiled is then of this text, or not kept."""
    for path in _PACKAGE.rglob("*.py"):
        _read(path)


@functools.cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """Returns the files of ours that a module imports when it is imported, by its text."""
    found = []
    for line in _IMPORT.finditer(_read(path)[1].decode()):
        of = line["of"] or ""
        names = [
            name.split()[0] for name in (line["names"] or line["modules"]).strip("() \n").split(",") if name.strip()
        ]
        for module in [of, *(f"{of}.{name}".strip(".") for name in names)]:
            package, *rest = module.split(".")
            file = _PACKAGE.joinpath(*rest).with_suffix(".py")
            if package == _PACKAGE.name and rest and file.is_file():
                found.append(file)
    return tuple(found)


@functools.cache
def sources_of(path: Path) -> tuple[Path, ...]:
    """Returns a module's file and all of ours that it imports, directly or not, in a fixed order."""
    known: set[Path] = set()
    new = {path}
    while new:
        known |= new
        new = {file for source in new for file in _imported_by(source)} - known
    return tuple(sorted(known))


def digest_of(paths: Iterable[Path], *facts: object) -> str:
    """Returns a hash of files, as they are written down, and of whatever else the result of compiling depends on."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        digest.update(path.name.encode() + b"\0" + _read(path)[1])
    return digest.hexdigest()[:16]


def are_unchanged(paths: Iterable[Path]) -> bool:
    """Returns whether files are as they were when this process has read them, and have been all the time."""
    return all(_read(path)[0] == _stamp(path) for path in paths)
