"""Words of text files, and text that every Python installation has."""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

# A word, or what ends a sentence.
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|[.!?](?=\s)|\n\s*\n")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of(source: str | Path) -> Iterator[str]:
    """Yields the text of each file of a folder, or of one file, in the order of their names.

    ``"python"`` is `python_texts`. Files that are not text (a zero byte at their beginning) are left out.

    Raises:
        FileNotFoundError: there is no such file or folder, or no text in it.
    """
    if str(source) == "python":
        yield from python_texts()
        return
    root = Path(source)
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    found = False
    for path in files:
        content = path.read_bytes()
        if b"\0" not in content[:1024]:
            found = True
            yield content.decode("utf-8", errors="ignore")
    if not found:
        raise FileNotFoundError(f"{root} holds no text file")


def python_texts() -> Iterator[str]:
    """Yields what this Python's standard library says about itself: docstrings, help topics, licences."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        documents = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        yield "\n\n".join(document for document in documents if document)
        if path.name == "topics.py":
            yield "\n\n".join(
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
    for path in sorted(root.glob("LICENSE*")):
        yield path.read_text(errors="ignore")


def sentences_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields each sentence's words, in lower case."""
    for text in texts:
        sentence: list[str] = []
        for token in _TOKEN.findall(text.lower()):
            if token[0].isalpha():
                sentence.append(token)
            elif sentence:
                yield sentence
                sentence = []
        if sentence:
            yield sentence


def key_of(word: str) -> int:
    """Returns a word's 64-bit key: the same in every process and on every machine."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)
