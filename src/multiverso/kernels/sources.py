"""What a kernel is made of: its module and everything of ours that it imports, read without importing it."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_IMPORT = re.compile(r"^from (multiverso[\w.]*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)


@functools.cache
def _read(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """Returns the files of ours that a module's ``from multiverso... import ...`` lines name."""
    found = []
    for module, names in _IMPORT.findall(_read(path).decode()):
        folder = _PACKAGE.joinpath(*module.split(".")[1:])
        inside = [
            folder / f"{name.split()[0]}.py" for name in names.strip("() \n").split(",") if name.strip()
        ]
        found += [file for file in (folder.with_suffix(".py"), *inside) if file.is_file()]
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
    """Returns a hash of files' contents and of whatever else the result of compiling them depends on."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in paths:
        digest.update(path.name.encode() + b"\0" + _read(path))
    return digest.hexdigest()[:16]
