"""The page as one HTML document that asks nobody for anything: styles, program and uPlot are inside."""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_HASHED = {"style": ("uplot/uPlot.min.css", "page.css"), "script": ("uplot/uPlot.iife.min.js", "page.js")}


@cache
def _parts() -> dict[str, str]:
    return {tag: "\n".join((_HERE / name).read_text("utf-8") for name in names) for tag, names in _HASHED.items()}


def document(data: bytes = b"", title: str = "multiverso") -> str:
    """Returns the page: one that follows a job, or, with data, one that shows what is in it.

    Args:
        data: a message with a job's past, as `Feed.everything` returns it.
        title: of the window.
    """
    # a "</script>" in a worker's name must not end the element
    embedded = data.decode().replace("<", "\\u003c")
    text = (_HERE / "page.html").read_text("utf-8")
    for mark, part in (("title", html.escape(title)), ("data", embedded), *_parts().items()):
        text = text.replace(f"<!--{mark}-->", part, 1)
    return text


def policy() -> str:
    """Returns the Content-Security-Policy of the page: its own style and program run, and nothing else is loaded."""
    hashes = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for tag, text in _parts().items()}
    # uPlot and the page set widths and colours by attributes of elements, from their programs only
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'"
    )
