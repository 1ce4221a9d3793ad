"""The line of progress, and what goes to Ray's metrics, from a node's status."""

from __future__ import annotations

import pytest

import multiverso as mv
from multiverso.runtime.session.current import current
from multiverso.runtime.session.observing import observe

pytest.importorskip("ray", reason="Ray is not installed here; `make ray` installs it")


def test_a_line_says_who_works_and_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiverso.ray.job import line_of

    monkeypatch.setenv("MULTIVERSO_TENSORBOARD", "")
    mv.init()
    table = mv.ArrayTableHandler(3)
    table.add([1.0] * 3)
    mv.log(step=7, loss=0.5)
    assert line_of(observe(current().address)) == "1 of 1 workers, 1 pushes, step 7: loss 0.5"
    mv.shutdown()
