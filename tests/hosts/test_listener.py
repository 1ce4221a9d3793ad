"""What strangers at the ports between hosts can cost: a line in a while, and nobody's place."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import wait_for
from rehearsing import rehearsal

from multiverso.hosts.control.connections import CoordinatorEnd, NodeEnd
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport import listener
from multiverso.hosts.transport.addresses import ANY
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.listener import open_port
from multiverso.runtime import Session
from multiverso.runtime.collective.reducer import Reducer
from multiverso.tables import ArrayTableHandler


@contextmanager
def control_port(hosts: int = 2) -> Iterator[tuple[CoordinatorEnd, Roster]]:
    """The coordinator of a job, which no other host has reached yet."""
    listener = open_port(("127.0.0.1", 0))
    credentials = new_credentials(encrypted=False).to_text()
    names = tuple(f"host-{i}" for i in range(hosts))
    roster = Roster(0, names, (1,) * hosts, listener.getsockname(), credentials, rehearsal=True)
    centre = CoordinatorEnd(roster, listener, lambda order: None)
    try:
        yield centre, roster
    finally:
        centre.close()


def test_a_stranger_cannot_fill_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with control_port() as (_, roster):
        for _ in range(20):
            with socket.create_connection(roster.coordinator) as stranger:
                stranger.settimeout(30)
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
                while stranger.recv(4096):
                    pass
    lines = [line for line in capfd.readouterr().err.splitlines() if "not a node of multiverso" in line]
    assert 1 <= len(lines) <= 1 + (time.monotonic() - began) / listener._LOG_SECONDS
    assert "from 127.0.0.1:" in lines[0]


def test_a_port_at_all_addresses_is_reached_by_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:  # a container's loopback, as a rule
        pytest.skip(f"there is no IPv6 here: {error}")
    listener = open_port((ANY, 0))
    try:
        for name in ("127.0.0.1", "::1"):
            with socket.create_connection((name, listener.getsockname()[1]), 10), listener.accept()[0]:
                pass
    finally:
        listener.close()


def test_a_host_gets_in_beside_as_many_idle_strangers_as_may_be_and_the_log_tells_of_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 300.0)
    with ExitStack() as stack:
        with control_port() as (centre, roster):
            idle = []
            for number in range(listener.STRANGERS):
                idle.append(stack.enter_context(socket.create_connection(roster.coordinator)))
                wait_for(lambda number=number: len(centre.listener.strangers) == number + 1)
            first_port = idle[0].getsockname()[1]
            heard: list[Any] = []
            second = NodeEnd(roster.on(1), ("127.0.0.1", 1), heard.append)
            wait_for(lambda: centre.all_came)
            assert not heard
            idle[0].settimeout(30)
            assert idle[0].recv(1) == b""
            assert len(centre.listener.strangers) == listener.STRANGERS - 1
            second.close()
        for each in idle[1:]:
            each.settimeout(30)
            assert each.recv(1) == b""
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "make room" in line]
    assert "16 connections at 127.0.0.1:" in line
    assert f"from 127.0.0.1:{first_port}," in line


def test_all_hosts_of_a_job_may_come_at_once() -> None:
    """When the first host's node was stopped for some seconds all others connected again, and ended each other's."""
    with ExitStack() as stack, control_port(hosts=64) as (centre, roster):
        coming = [stack.enter_context(socket.create_connection(roster.coordinator)) for _ in range(63)]
        wait_for(lambda: len(centre.listener.strangers) == 63)
        for each in coming:
            each.settimeout(0)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_a_connection_that_gets_no_thread_is_closed_and_the_next_one_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, []

    def start_but_the_first_at_the_door(thread: threading.Thread) -> None:
        if thread.name.endswith("-admit") and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_the_first_at_the_door)
    with control_port() as (centre, roster):
        with socket.create_connection(roster.coordinator) as first:
            first.settimeout(30)
            assert first.recv(1) == b""
        second = NodeEnd(roster.on(1), ("127.0.0.1", 1), lambda order: None)
        wait_for(lambda: centre.all_came)
        second.close()
    assert failed


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_neither_the_port_nor_those_who_knock() -> None:
    with control_port() as (centre, roster), socket.create_connection(roster.coordinator):
        wait_for(lambda: len(centre.listener.strangers) == 1)
        child = os.fork()
        if child == 0:
            sockets = [centre.listener._port, *centre.listener.strangers]
            os._exit(any(each.fileno() >= 0 for each in sockets))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_connections() -> list[str]:
    """Returns where this process's connections to other processes lead."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if link.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    if connection.family == socket.AF_INET:
                        found.append(str(connection.getpeername()))
    return found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_to_another_host() -> None:
    def work(session: Session) -> Any:
        ArrayTableHandler(3, session=session)  # opens the connections for values
        total = Reducer(session, 2).all_reduce(np.ones(3))  # and those for messages
        session.barrier()
        kept = None
        if session.worker_id == 0:
            here = len(open_connections())
            child = os.fork()
            if child == 0:
                os._exit(len(open_connections()))
            kept = here, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        session.barrier()
        return total[0], kept

    with rehearsal(1, 1) as job:
        (total, (here, kept)), _ = job.run(work)
    assert total == 2
    assert here >= 6, "both ends of a connection for values, for messages, and to the first host"
    assert kept == 0
