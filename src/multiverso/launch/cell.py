"""The page of `multiverso.run(..., page=True)`: in a notebook's cell, or its address on standard error."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multiverso.launch.watched import Page, Watch
from multiverso.runtime.node.node import Node
from multiverso.saying import say

# in a <div>, as IPython warns of a bare frame
_FRAME = (
    '<div><iframe title="The page of the job" {} style="width: 100%; height: 40rem; border: 1px solid #8888"></iframe>'
    "</div>"
)


@contextmanager
def shown(node: Node) -> Iterator[Watch]:
    """Shows a page of a node's job: live until it is over, and then what it showed in the end, without a server."""
    page = Page()
    with Watch(page, say) as watch:
        cell: Any = None
        if _in_notebook():
            from IPython.display import HTML, display

            cell = display(HTML(_FRAME.format(f'src="{html.escape(page.address)}"')), display_id=True)
        else:
            say(f"the page is at {page.address}")
        try:
            with watch.following(node):
                yield watch
        finally:
            if cell is not None and watch.history.now is not None:
                from multiverso.page.feed import Feed

                text = html.escape(Feed(history=watch.history).saved())
                cell.update(HTML(_FRAME.format(f'srcdoc="{text}"')))


def _in_notebook() -> bool:
    """Whether this process shows what is displayed: a terminal's IPython does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
