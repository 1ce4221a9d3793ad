"""Hosts by ssh: what they are called for the others, and which one is said to have failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiverso.cli.main import run_command
from multiverso.errors import StartupError
from multiverso.launch import _ssh
from multiverso.launch.hosts import culprit_of
from multiverso.launch.results import WorkerExit
from multiverso.launch.ssh import DEFAULT_SSH, addresses_of, checked_names


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What says of its configuration what OpenSSH says: gpu1 is an alias, and far is behind a tunnel."""
    monkeypatch.setattr("multiverso.launch.ssh._LOOK_SECONDS", 60.0)  # who is slow here is not asked in vain
    here = tmp_path / "ssh"
    here.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2 $3" = "-p 22 -G" ] || exit 255\n'
        'case "$4" in (*gpu1) name=10.0.0.7;; (far) name=127.0.0.1;; (*) name=${4#*@};; esac\n'
        'printf "user root\\nhostname %s\\nport 22\\n" $name\n'
    )
    here.chmod(0o755)
    return [str(here), "-p", "22"]


def test_an_alias_of_sshs_is_for_the_others_what_it_stands_for(ssh: list[str]) -> None:
    names = checked_names("--hosts", ["me@gpu1", "node2 ", "far", "[fd00::7]"])
    assert names == ("me@gpu1", "node2", "far", "fd00::7")
    assert addresses_of(names, ssh) == ("10.0.0.7", "node2", "far", "fd00::7")
    assert addresses_of(names[:2], ["not-ssh"]) == ("gpu1", "node2")
    assert addresses_of(names[:2], [ssh[0], "-p", "23"]) == ("gpu1", "node2")


@pytest.mark.parametrize("name", ["localhost", "me@localhost", "127.0.0.1", "::1"])
def test_a_host_that_each_would_find_in_itself_is_refused(ssh: list[str], name: str) -> None:
    with pytest.raises(StartupError, match=f"--hosts: {name} leads every host to itself"):
        addresses_of((name, "node2"), ssh)
    assert addresses_of((name, "127.0.0.2"), ssh)[1] == "127.0.0.2"  # all of them here, to try it


def test_the_host_that_has_failed_is_named_and_not_one_that_was_ended_then() -> None:
    """A launcher that is ended before it listens to signals has ssh say 255, too."""
    ended = WorkerExit(0, 1, _ssh.FAILED, None, True, 0.1)
    consequence = WorkerExit(2, 1, 143, None, False, 0.1)
    for code in (_ssh.FAILED, 127, 7):
        failed = WorkerExit(1, 1, code, None, False, 0.1)
        assert culprit_of([ended, failed, consequence]) is failed
        first = WorkerExit(0, 1, 137, "SIGKILL", False, 0.1)
        assert culprit_of([first, failed, consequence]) is first, "no job goes on without it"
    finished = WorkerExit(0, 1, 0, None, False, 0.1)
    assert culprit_of([finished, consequence]) is consequence, "the job has failed, and its exit code says so"


LATE_SIGNAL = """
import os, signal, sys
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)  # while modules are taken down: the interpreter has put its own handlers back
late = Late()
from multiverso.launch import _ssh
_ssh.main()
"""


def test_a_signal_at_the_end_does_not_take_the_place_of_the_exit_code() -> None:
    """The launcher ends the others when it has seen one host's end: the code of the one that failed first was lost."""
    command = [sys.executable, "-c", LATE_SIGNAL, "sh", "-c", "read roster; exit 7"]
    done = subprocess.run(command, env={**os.environ, "MULTIVERSO_ROSTER": "a roster"}, timeout=60, check=False)
    assert done.returncode == 7


def test_the_end_of_ssh_by_a_signal_is_that_of_the_connection(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", _ssh.__file__, "sh", "-c", "read roster; kill -9 $$"]
    done = subprocess.run(command, env={"MULTIVERSO_ROSTER": "a roster"}, timeout=60, check=False)
    assert done.returncode == _ssh.FAILED


def test_the_command_line_reaches_hosts_as_everything_else_does() -> None:
    assert [each.default for each in run_command.params if each.name == "ssh"] == [DEFAULT_SSH]
