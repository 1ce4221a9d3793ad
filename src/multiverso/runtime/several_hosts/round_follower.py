"""The node's thread that looks whether this host's workers are ready for a round, whenever one says something."""

from __future__ import annotations

import threading
from collections.abc import Callable

from multiverso import layout as at
from multiverso.kernels import chained_node, waits
from multiverso.memory.words import load32

_LONGEST_SECONDS = 0.5


class RoundFollower:
    """Owner: whoever made it; ``close`` ends it.

    Args:
        control: address of the control segment, whose event word tells.
        look: called after each event; returns the seconds after which it wants to be called without one, or None.
        gone_wrong: called with an error that ends it.
    """

    def __init__(
        self, control: int, look: Callable[[], float | None], gone_wrong: Callable[[Exception], None]
    ) -> None:
        self._control, self._look, self._gone_wrong = control, look, gone_wrong
        self._sleep, self._wake = chained_node.sleep.compiled(), waits.wake.compiled()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiverso-hosts-rounds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._wake(self._control)
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = load32(self._control + at.EVENT)
            try:
                wait = self._look()
            except Exception as error:
                self._gone_wrong(error)
                return
            seconds = _LONGEST_SECONDS if wait is None else min(wait, _LONGEST_SECONDS)
            if not self._closing.is_set():
                self._sleep(self._control, event, int(seconds * 1e9))
