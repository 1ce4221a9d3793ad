"""What strangers on the network between hosts can read, pretend to be, or find out."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from contextlib import closing

import pytest

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.hosts.transport import handshake
from multiverso.hosts.transport.credentials import Credentials, new_credentials
from multiverso.hosts.transport.handshake import Hello
from multiverso.hosts.transport.listener import open_port
from multiverso.launch import hosts
from multiverso.launch.options import RunOptions

SAID = b"what a table holds" * 20


class Wire:
    """Stands between who connects and who listens, and keeps what passes."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.heard = bytearray()
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._carry)]
        self._threads[0].start()

    def _carry(self) -> None:
        with self._listener.accept()[0] as one, socket.create_connection(self._to) as other:
            back = threading.Thread(target=self._copy, args=(other, one))
            back.start()
            self._copy(one, other)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for thread in self._threads:
            thread.join(30)
        self._listener.close()


def _speak(job: Credentials) -> bytes:
    """Two hosts say something to each other; returns what passes between them."""
    listener = open_port(("127.0.0.1", 0))
    wire = Wire(listener.getsockname())
    got = bytearray(len(SAID))

    def listen() -> None:
        channel, _ = handshake.accept(listener.accept()[0], job, Hello(0, 2, 1), Deadline.after(30))
        view = memoryview(got)
        while view:
            view = view[channel.recv_into(view) :]
        channel.shutdown()
        channel.close()

    thread = threading.Thread(target=listen)
    thread.start()
    channel, _ = handshake.connect(wire.address, job, Hello(1, 2, 1), Deadline.after(30))
    channel.send(SAID)
    thread.join(30)
    channel.shutdown()
    channel.close()
    wire.close()
    listener.close()
    assert bytes(got) == SAID
    return bytes(wire.heard)


def test_what_travels_between_hosts_cannot_be_read() -> None:
    pytest.importorskip("OpenSSL", reason="what encrypts between hosts is not installed")
    assert SAID in _speak(new_credentials(False))  # the wire does hear what is said
    job = new_credentials()
    heard = _speak(job)
    assert SAID[:18] not in heard
    assert job.secret not in heard


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_shows_no_certificate_or_speaks_an_older_tls_is_not_heard(newest: ssl.TLSVersion) -> None:
    pytest.importorskip("OpenSSL", reason="what encrypts between hosts is not installed")
    listener = open_port(("127.0.0.1", 0))
    said: list[object] = []

    def listen() -> None:
        try:
            said.append(handshake.accept(listener.accept()[0], new_credentials(), Hello(0, 2, 1), Deadline.after(30)))
        except (OSError, StartupError) as error:
            said.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = newest
    with socket.create_connection(listener.getsockname()) as plain:
        try:
            with context.wrap_socket(plain) as stranger:  # 1.3 lets who connects speak before it knows
                stranger.sendall(b"MVHS")
                heard = stranger.recv(1)
        except OSError:
            heard = b""
    thread.join(30)
    assert heard == b""
    listener.close()
    assert isinstance(said[0], OSError | StartupError)


def test_what_hosts_are_told_by_ssh_has_no_secret_on_a_command_line() -> None:
    options = RunOptions("train.py", workers=2, hosts="one,two", ssh="sh", encrypted=False)
    plan = hosts.plan_of(options)
    for command in hosts.host_commands(options, plan, os.environ):
        assert plan.roster.credentials not in " ".join(command.arguments)


def test_a_rehearsal_listens_on_loopback_only() -> None:
    with closing(hosts.plan_of(RunOptions("train.py", workers=2, hosts="2"))) as plan:
        assert plan.roster.bind == plan.roster.coordinator[0] == "127.0.0.1"
