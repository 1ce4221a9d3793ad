"""`multiverso doctor --hosts`: over what stands in for ssh, it runs the command line here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multiverso.cli import host_doctor
from multiverso.cli.host_doctor import (
    Probe,
    compare_clocks,
    compare_encryption,
    compare_versions,
    cost_of_rows,
    examine_hosts,
)
from multiverso.errors import StartupError


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Reaches every host but 127.0.0.9, which is this machine."""
    here = tmp_path / "here.sh"
    here.write_text(
        '#!/bin/sh\n[ "$1" = 127.0.0.9 ] && { echo "no route" >&2; exit 255; }\n'
        'echo "Welcome! {0}"\nexec sh -c "$2"\n'  # as a shell may that starts there
    )
    here.chmod(0o755)
    return str(here)


def test_the_doctor_tries_what_a_job_on_these_hosts_needs(ssh: str, port: int) -> None:
    command = [sys.executable, "-m", "multiverso", "doctor", "--json", "--hosts", "127.0.0.1,127.0.0.9,localhost"]
    done = subprocess.run(
        [*command, "--ssh", ssh, "--port", str(port)], capture_output=True, text=True, timeout=100, check=False
    )
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1, "one of them is not there"
    states = {name: check["state"] for name, check in found.items()}
    assert states.pop("host 127.0.0.9") == "fail"
    assert "no route" in found["host 127.0.0.9"]["text"]
    assert set(states.values()) == {"ok"}, found
    hosts = {"host 127.0.0.1", "host localhost", "to 127.0.0.1"}
    assert states.keys() == hosts | {"versions", "encryption", "clocks", "rows by key"}
    assert " ms or more (" in found["rows by key"]["text"]
    assert f"port {port} and others" in found["to 127.0.0.1"]["text"]


def test_a_host_that_says_much_and_no_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its lines was given the whole time anew."""
    ssh = tmp_path / "talks.sh"
    ssh.write_text("#!/bin/sh\nfor i in $(seq 60); do echo hello; sleep 0.1; done\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(host_doctor, "_START_SECONDS", 0.3)
    with Probe("node1", "node1", [str(ssh)]) as probe:
        probe.meet()
    assert "did not answer within 0.3 s" in probe.why


def test_a_port_that_is_taken_and_one_that_is_not_reached_are_named(ssh: str, port: int, monkeypatch: Any) -> None:
    with socket.create_server(("", port)):
        found = {each.name: each for each in examine_hosts("127.0.0.1,localhost", ssh, port)}
    assert found["to 127.0.0.1"].state == "fail"
    assert f"it cannot listen at {port}" in found["to 127.0.0.1"].text

    asked = Probe.ask

    def wrong_way(probe: Probe, question: dict[str, Any]) -> dict[str, Any]:
        if "reach" in question:  # as if something stood between the two
            question = {"reach": [[address, 1] for address, _ in question["reach"]]}
        return asked(probe, question)

    monkeypatch.setattr(Probe, "ask", wrong_way)
    found = {each.name: each for each in examine_hosts("127.0.0.1,localhost", ssh, port)}
    assert found["to 127.0.0.1"].state == "fail"
    assert f"localhost cannot reach 127.0.0.1:{port}: " in found["to 127.0.0.1"].text
    assert "at all ports" in found["to 127.0.0.1"].advice


def test_what_ssh_leaves_behind_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that it shares, as `ControlPersist` says, may hold its output open for hours."""
    ssh = tmp_path / "leaves.sh"
    ssh.write_text('#!/bin/sh\nsleep 20 >/dev/null &\necho $! >left\necho "no way there" >&2\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with Probe("node-b", "node-b", [str(ssh)]) as probe:
        probe.meet()
        pid = int(Path("left").read_text())
        assert Path(f"/proc/{pid}/cmdline").read_bytes(), "it was waited for"
        os.kill(pid, signal.SIGKILL)
    assert probe.why == "its probe ended: no way there"


class Said(Probe):
    """A probe that has said this, and whose clock is so many seconds ahead."""

    def __init__(self, host: str, ahead: float = 0.0, **versions: str | None) -> None:
        self.host, self.address, self.why, self._ahead = host, host, "", ahead
        self.said = {"versions": {"multiverso": "1", "pyopenssl": "1", "cryptography": "1", **versions}}

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        import time

        return {"time": time.time() + self._ahead}


def test_different_versions_clocks_and_a_missing_extra_are_told() -> None:
    found = compare_versions([Said("a"), Said("b", multiverso="2")])
    assert (found.state, found.text) == ("fail", "multiverso: 1 on a, 2 on b")
    found = compare_versions([Said("a"), Said("b", cryptography="2")])
    assert (found.state, found.text) == ("warn", "cryptography: 1 on a, 2 on b")
    found = compare_encryption([Said("a"), Said("b", pyopenssl=None)])
    assert (found.state, found.text) == ("fail", "b cannot encrypt")
    found = compare_clocks([Said("a"), Said("b", ahead=60)])
    assert (found.state, found.text) == ("warn", "b is 60.0 s ahead of a")


def test_what_rows_by_key_cost_is_told() -> None:
    """All hosts have as many, so the one with the least memory says how many."""
    probes = [Said("a"), Said("b"), Said("c")]
    for probe, free in zip(probes, (8e9, 2.96e9, 9e9), strict=True):
        probe.said["free"] = free
    found = cost_of_rows(list(probes), [0.0002, 0.0011])
    assert found.text == (
        "some 30 million rows of 64 float32 in a KeyedTable, half with copies=2; to fetch one takes 1.6 ms or more "
        "(b has the least memory: 3.0 GB)"
    )


@pytest.mark.parametrize("hosts", ["a", "a,", "a,-b", "3"])
def test_what_are_no_hosts_is_refused(hosts: str) -> None:
    with pytest.raises(StartupError, match=r"--hosts .*: give"):
        list(examine_hosts(hosts, "ssh", 1))
