"""Hooks of MkDocs: options of commands from their help, and search that ranks the pages about the inside last."""

from __future__ import annotations

import html
import re
from typing import Any

import click

from multiverso.cli.main import app

OPTIONS = re.compile(r"^## multiverso (\w+)\n(?:(?!## ).*\n)*?<!-- options -->$", re.M)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if any(section.title == "Inside" for section in page.ancestors):
        page.meta.setdefault("search", {})["boost"] = 0.1
    return with_options(markdown)


def with_options(markdown: str) -> str:
    """Returns a page with a table of options in the place of each ``<!-- options -->``."""
    return OPTIONS.sub(lambda found: found[0].replace("<!-- options -->", options(found[1])), markdown)


def options(command: str) -> str:
    """Returns the table of a command's options."""
    shown = (param for param in app.commands[command].params if isinstance(param, click.Option) and not param.hidden)
    rows = [
        (", ".join(f"`{name}`" for name in option.opts), default(option), html.escape(option.help or ""))
        for option in shown
    ]
    return "\n".join(["| option | default | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def default(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    given = option.default
    return f"`{given}`" if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
