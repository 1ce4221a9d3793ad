"""The page of `multiverso.run(..., page=True)`: in a notebook's cell, or its address on standard error."""

from __future__ import annotations

import html
import sys
from typing import Any

from multiverso.launch.watched import Page, Watch

# in a <div>, as IPython warns of a bare frame
_FRAME = (
    '<div><iframe title="The page of the job" {} style="width: 100%; height: 40rem; border: 1px solid #8888"></iframe>'
    "</div>"
)


class Cell:
    """Where the page is shown: live while the job runs, and what it showed in the end, which needs no server."""

    def __init__(self, page: Page) -> None:
        self._handle: Any = None
        if _in_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML(_FRAME.format(f'src="{html.escape(page.address)}"')), display_id=True)
        else:
            print(f"multiverso: the page is at {page.address}", file=sys.stderr, flush=True)

    def keep(self, watch: Watch) -> None:
        """Replaces the live page by what it shows now."""
        if self._handle is not None and watch.history.now is not None:
            from IPython.display import HTML

            from multiverso.page.feed import Feed

            text = html.escape(Feed(history=watch.history).saved())
            self._handle.update(HTML(_FRAME.format(f'srcdoc="{text}"')))


def _in_notebook() -> bool:
    """Whether this process shows what is displayed: a terminal's IPython does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
