"""Counts the code proper of src/: lines without docstrings, comments, imports and blank lines, room by room.

python scripts/count.py [--files] [FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SPACING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(text: str) -> int:
    """Returns how many lines of a module are code proper."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node = node.body[0]
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SPACING:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--files", action="store_true", help="each file, not each room")
    given = parser.parse_args()
    rooms: Counter[str] = Counter()
    files = sorted(given.folder.rglob("*.py"))
    for file in files:
        place = file.relative_to(given.folder)
        rooms["/".join(place.parts if given.files else place.parts[:2])] += lines_of(file.read_text())
    for room, lines in rooms.most_common():
        print(f"{lines:6}  {room}")
    print(f"{sum(rooms.values()):6}  in {len(files)} files")


if __name__ == "__main__":
    main()
