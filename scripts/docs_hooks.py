"""Hooks of MkDocs: search ranks the pages about the inside below those for users."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if any(section.title == "Inside" for section in page.ancestors):
        page.meta.setdefault("search", {})["boost"] = 0.1
    return markdown
