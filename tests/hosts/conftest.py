"""Lets the tests of this folder import what helps them, and compiles what they need before the first deadline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "core"):
    sys.path.insert(0, str(folder))

import networks  # noqa: E402
from networks import Network  # noqa: E402

IN_ROUNDS = ("rounds.calls", "quorum", *(f"between_hosts.{name}" for name in ("node", "quorum", "rounds")))


@pytest.fixture(params=["namespaces", "loopback"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Two hosts with a network device each where they can be made, else two that share this machine's address."""
    missing = networks.missing()
    if request.param == "loopback":
        if missing is None:
            pytest.skip("network namespaces can be made here: the same test runs in those")
        yield networks.LOOPBACK
        return
    if missing is not None:
        pytest.skip(missing)
    with networks.namespaces() as made:
        yield made


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    from multiverso.compiling.on_demand import Group, ensure_all
    from multiverso.spec.table import DTYPES

    groups: list[Group] = [("between_hosts.agreeing", None), ("waits", None)]
    groups += [(name, dtype) for dtype in DTYPES for name in ("between_hosts.agreeing", "dense", "rows")]
    for dtype in (None, "float32"):
        groups += [(name, dtype) for name in IN_ROUNDS]
    ensure_all([(f"multiverso.kernels.{name}", dtype) for name, dtype in groups])
