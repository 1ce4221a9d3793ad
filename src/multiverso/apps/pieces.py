"""Pieces of files, of whole lines: what one worker reads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from multiverso.files.opening import write_whole

_BYTES = 1 << 18


@dataclass(frozen=True)
class Piece:
    """The lines of a file that begin between two places."""

    path: Path
    start: int
    end: int

    def lines(self) -> bytes:
        """Reads them."""
        with open(self.path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)  # a line that begins right here is ours
                file.readline()
            left = self.end - file.tell()
            if left <= 0:
                return b""
            content = file.read(left)
            return content if content.endswith(b"\n") else content + file.readline()


def write(to: Path, source: Path, size: int = _BYTES) -> None:
    """Writes a list of the pieces of a file, or of all text files of a folder.

    Raises:
        FileNotFoundError: there is no such file, or no text in it.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    lines = []
    for path in files:
        with open(path, "rb") as file:
            if b"\0" in file.read(1024):
                continue  # no text
        end = path.stat().st_size
        lines += [f"{at} {min(at + size, end)} {path.absolute()}" for at in range(0, end, size)]
    if not lines:
        raise FileNotFoundError(f"{source} holds no text")
    write_whole(to, "\n".join(lines).encode())


def read(path: Path) -> list[Piece]:
    """Returns the pieces that `write` has listed."""
    found = []
    for line in path.read_text().splitlines():
        start, end, name = line.split(" ", 2)
        found.append(Piece(Path(name), int(start), int(end)))
    return found
