"""What is published on a host, for those who look at the job from another one."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from multiverso.hosts.control.messages import Publication
from multiverso.runtime.several_hosts import publishers
from multiverso.runtime.several_hosts.this_host import ThisHost


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyError("name")])
def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Where a publisher's status had no name, the node ended, as if no values could be exchanged."""
    found = Publication("model", 1, None, 0, 0, 8)
    closing = threading.Event()
    looks = 0

    def look(_: str) -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise error
        closing.set()
        return [msgspec.to_builtins(found)]

    monkeypatch.setattr(publishers, "publications_of", look)
    monkeypatch.setattr(publishers, "_LOOK_SECONDS", 0.001)
    none: Any = None
    posted: list[Any] = []
    here = ThisHost(none, none, none, none, posted.append, none, closing)
    watched = publishers.Publishers("a job", here)
    watched.watch()
    here.join()
    assert (watched.seen, posted) == ([found], [])


def test_where_a_thread_cannot_begin_the_others_are_still_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the node, too, raised: a thread that had not begun was waited for."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    none: Any = None
    here = ThisHost(none, none, none, none, none, none, threading.Event())
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="start new thread"):
        patch.setattr(threading.Thread, "start", refused)
        here.thread("watch", lambda: None)
    here.join()
