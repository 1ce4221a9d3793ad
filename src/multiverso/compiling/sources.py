"""What a kernel is made of: its module and everything of ours that it imports, read without importing it.

What is compiled depends on what the sources mean, not on how they are written down: comments, docstrings and the places
of lines change nothing. Told by the syntax tree; parsing takes a process as long as all else in its start, so what was
found out about a text is kept beside the compiled kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from multiverso.compiling.object_cache import cache_directory
from multiverso.files import opening as files

if TYPE_CHECKING:
    import ast

_PACKAGE = Path(__file__).parent.parent
_IMPORT = re.compile(
    r"^(?:from (?P<of>multiverso[\w.]*) import (?P<names>\([^)]*\)|[^\n]+)|import (?P<modules>[^\n]+))", re.MULTILINE
)
_KEPT = "meanings.json"
_MOST_KEPT = 2000

Stamps = dict[Path, tuple[int, int] | None]
"""Of each file when it was last written to, in nanoseconds, and its size; None where it is gone."""


@functools.cache
def _read(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def _imported_by(path: Path) -> tuple[Path, ...]:
    """Returns the files of ours that a module imports when it is imported, by its text."""
    found = []
    for line in _IMPORT.finditer(_read(path).decode()):
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
    """Returns a hash of what files mean and of whatever else the result of compiling them depends on."""
    paths = list(paths)
    meanings = _meanings([_read(path) for path in paths])
    digest = hashlib.sha256(repr(facts).encode())
    for path, meaning in zip(paths, meanings, strict=True):
        digest.update(path.name.encode() + b"\0" + meaning.encode())
    return digest.hexdigest()[:16]


def exact_digest(paths: Iterable[Path]) -> str:
    """Returns a hash of files as they are written down."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + _read(path))
    return digest.hexdigest()


# -- whether they have stayed as they were ----------------------------------------------------------------------


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Returns of each file what is different once it has been written to or replaced."""
    return {path: _stamp(path) for path in paths}


def stamps_of_all() -> Stamps:
    """Returns them of all of ours."""
    return stamps_of(_PACKAGE.rglob("*.py"))


def are_unchanged(paths: Iterable[Path], stamps: Stamps) -> bool:
    """Returns whether files are as they were when their stamps were taken, and as this process has read them."""
    try:
        return all(stamps[path] == _stamp(path) and path.read_bytes() == _read(path) for path in paths)
    except OSError:  # one is gone
        return False


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


# -- what a text means -----------------------------------------------------------------------------------------


def meaning_of(text: bytes) -> str:
    """Returns a hash of a module without its comments, its docstrings and the places of its lines."""
    import ast  # not in a process that finds its kernels compiled

    tree = _parsed(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a constant by itself does nothing, wherever it stands
            body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return _hash(ast.dump(tree).encode())


def _parsed(text: bytes) -> ast.Module:
    """Returns a module's syntax tree, whatever other threads parse meanwhile.

    CPython 3.11 and 3.12 count how deep a tree is for all threads together, and raise SystemError where two make
    trees at once, which are over in a few milliseconds. We take no lock: a signal's handler may come in the middle,
    and a fork.
    """
    import ast

    for _ in range(100):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
        time.sleep(0.005)
    return ast.parse(text)


def _meanings(texts: list[bytes]) -> list[str]:
    hashes = [_hash(text) for text in texts]
    directory = cache_directory()
    known = _known(directory)
    new = {h: meaning_of(text) for h, text in zip(hashes, texts, strict=True) if h not in known}
    if new:
        known.update(new)
        _keep(directory, new)
    return [known[h] for h in hashes]


def _kept_in(directory: Path | None) -> dict[str, str]:
    """Returns what is known of texts, by their hashes."""
    found: object = None
    if directory is not None:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(files.read_own(directory / _KEPT))
    if isinstance(found, dict) and all(isinstance(meaning, str) for meaning in found.values()):
        return found
    return {}


_known = functools.cache(_kept_in)


def _keep(directory: Path | None, new: dict[str, str]) -> None:
    """Adds to what is kept. Of two processes that do so at once, one finds it out again another time."""
    if directory is None:
        return
    before = _kept_in(directory)
    kept = {**(before if len(before) < _MOST_KEPT else {}), **new}
    with contextlib.suppress(OSError):
        files.write_whole(directory / _KEPT, json.dumps(kept, indent=0).encode(), mode=0o600)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
