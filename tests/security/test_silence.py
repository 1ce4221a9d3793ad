"""A node that is stopped, or that is none: an error soon, not at the deadline. One that is only slow is waited for."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import pytest
from security_support import Person

from multiverso.errors import StartupError, WaitTimeoutError
from multiverso.runtime import Session, observe
from multiverso.runtime.session import node_link
from multiverso.runtime.session.node_link import Silence

NODE = """
from multiverso.runtime import Node
with Node(1, name=args[0]):
    say("ready")
    sys.stdin.readline()
"""
LISTENS = """
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind("\\0" + args[0])
s.listen(9)
say("ready")
sys.stdin.readline()
"""
STARTS_SLOWLY = """
import threading
from multiverso.runtime import Node
from multiverso.wire import messages
s = messages.listen(args[0])
told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told.set())).start()
say("listens")
while not told.is_set():  # what takes the processor has not begun to sleep
    pass
with Node(1, listener=s) as node:
    node.wait(60)
"""


def _name(what: str) -> str:
    return f"multiverso-test-{os.getpid()}-{what}"


@pytest.mark.parametrize("ask", [Session, observe])
def test_a_stopped_node_is_given_up_soon(ask: Any) -> None:
    with Person(NODE, _name("stopped"), uid=os.getuid()) as node:
        node.hear()
        os.kill(node.process.pid, signal.SIGSTOP)
        # until it is: on another processor it may go on for a moment, and answer
        os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            with pytest.raises(StartupError, match=rf"is stopped: process {node.process.pid} .*kill -CONT") as caught:
                Session(_name("stopped"), start_timeout_seconds=100) if ask is Session else observe(
                    _name("stopped"), 100
                )
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        assert "python" in str(caught.value)
        with Session(_name("stopped")):  # it goes on
            pass


def test_a_node_that_is_stopped_later_is_named_by_who_waits_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    with Person(NODE, _name("later"), uid=os.getuid()) as node:
        node.hear()
        with Session(_name("later"), timeout_seconds=60) as session:
            os.kill(node.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, node.process.pid, os.WSTOPPED | os.WNOWAIT)
            words = rf"node is stopped: process {node.process.pid} .*kill -CONT"
            try:
                with pytest.raises(WaitTimeoutError, match=words):
                    session.shared_memory("mine", 64, timeout_seconds=5)
            finally:
                os.kill(node.process.pid, signal.SIGCONT)
            assert re.search(rf"worker 0 has waited [1-5] s for .*{words}", capfd.readouterr().err)
            assert session.shared_memory("mine", 64).array.size == 64  # it goes on


def test_who_holds_the_name_and_sleeps_is_given_up_soon() -> None:
    with Person(LISTENS, _name("none"), uid=os.getuid()) as someone:
        someone.hear()
        assert node_link.holders(_name("none")) == [someone.process.pid]
        told = "is stopped"
        while "is stopped" in told:  # make pauses stops any process for a moment
            with pytest.raises(StartupError) as error:
                Session(_name("none"), start_timeout_seconds=100)
            told = str(error.value)
        assert re.search(rf"does not answer: process {someone.process.pid} .* has been asleep since we asked", told)


def test_a_node_that_starts_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Semaphore(0)
    look = Silence.look

    def counted(self: Silence) -> None:
        look(self)
        looks.release()

    monkeypatch.setattr(Silence, "look", counted)
    with Person(STARTS_SLOWLY, _name("slow"), uid=os.getuid()) as node:
        node.hear()
        came: list[Any] = []

        def come() -> None:
            with Session(_name("slow"), start_timeout_seconds=100) as session:
                came.append(session.worker_id)

        worker = threading.Thread(target=come)
        worker.start()
        for _ in range(5):
            assert looks.acquire(timeout=60)
        node.tell()
        worker.join(60)
        assert came == [0]
