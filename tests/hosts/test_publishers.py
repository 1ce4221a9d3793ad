"""What is published on a host, for those who look at the job from another one."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from multiverso.hosts.control.messages import Publication
from multiverso.runtime.several_hosts import publishers
from multiverso.runtime.several_hosts.this_host import ThisHost


def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Publication("model", 1, None, 0, 0, 8)
    closing = threading.Event()
    looks = 0

    def look(_: str) -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError(24, "Too many open files")
        closing.set()
        return [msgspec.to_builtins(found)]

    monkeypatch.setattr(publishers, "publications_of", look)
    monkeypatch.setattr(publishers, "_LOOK_SECONDS", 0.001)
    none: Any = None
    here = ThisHost(none, none, none, none, none, none, closing)
    watched = publishers.Publishers("a job", here)
    watched.watch()
    here.join()
    assert watched.seen == [found]
