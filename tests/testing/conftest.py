"""Compiles what the rehearsals of hosts need, before the first deadline."""

from __future__ import annotations

import pytest

DTYPES = ("float32", "float64", "int32", "int64")
BETWEEN_HOSTS = tuple(f"between_hosts.{name}" for name in ("agreeing", "node", "quorum", "rounds"))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    from multiverso.compiling.on_demand import ensure_all

    names = ("dense", "rows", "rounds.calls", *BETWEEN_HOSTS)
    ensure_all([(f"multiverso.kernels.{name}", dtype) for dtype in (None, *DTYPES) for name in names])


@pytest.fixture(scope="module", autouse=True)
def forked(forked_runs: None) -> None:
    """The suites' processes are forks of one interpreter."""
