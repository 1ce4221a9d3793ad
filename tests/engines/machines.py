"""Machines of a cluster that are namespaces of this one: each has a name, a network card and processes of its own.

Daemons that are made for whole machines (sshd, munged, slurmd) run in them as they would anywhere. What the machines
share is the file system, and a folder in the place of root's home directory. When a machine's first process ends, the
system ends all others in it and takes its network and mounts away.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.77.9"
_FIRST = """
set -eu
mount --make-rprivate /
for folder in /run /dev/shm; do mount -t tmpfs none $folder; done
mount --bind {home} {user_home}
mount --bind {hosts} /etc/hosts
hostname {name}
echo ready
trap '' CHLD  # the system buries those whose parents have ended
exec sleep infinity
"""


def missing(*programs: str) -> str | None:
    """Returns what is not there of what the machines and these programs need; None where all of it is."""
    if os.geteuid():
        return "machines of namespaces can be made by root only"
    for program in ("unshare", "nsenter", "ip", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed here"
    return None


@dataclass(frozen=True)
class Machine:
    """One of them.

    Attributes:
        name: what it calls itself, and the others call it.
        address: of its network card.
        first: its first process, as this machine numbers it.
        card: this machine's end of its cable.
    """

    name: str
    address: str
    first: int
    card: tuple[str, str]

    def command(self, *words: object, folder: object = "/") -> list[str]:
        """Returns the command that runs another there."""
        enter = ("nsenter", "-t", self.first, "-m", "-u", "-i", "-n", "-p", "--", "env", "-C", folder)
        return [str(word) for word in (*enter, *words)]

    def start(self, *words: object, folder: object = "/", **options: object) -> subprocess.Popen[str]:
        """Starts a command there, in a session of its own; it ends with the machine."""
        return subprocess.Popen(
            self.command(*words, folder=folder), text=True, start_new_session=True, **options
        )  # type: ignore[call-overload, no-any-return]

    def run(
        self, *words: object, folder: object = "/", timeout: float = 120.0, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end."""
        return subprocess.run(
            self.command(*words, folder=folder),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **options,
        )  # type: ignore[call-overload, no-any-return]

    def processes(self) -> dict[int, str]:
        """Returns the command lines of what runs there, by the numbers that they have there; not the first one's."""
        listed = self.run("ps", "-eo", "pid=,args=").stdout
        lines = (line.split(None, 1) for line in listed.splitlines())
        return {int(pid): args for pid, args in lines if int(pid) != 1 and not args.startswith("ps -eo")}

    def plug(self, there: bool) -> None:
        """Pulls its cable, or plugs it in again."""
        _ip("-n", self.card[0], "link", "set", self.card[1], "up" if there else "down")

    def end(self) -> None:
        """Ends all that runs there, at once, as when its power is cut."""
        os.kill(self.first, signal.SIGKILL)


@contextmanager
def machines(folder: Path, number: int = 2) -> Iterator[list[Machine]]:
    """Makes machines node1, node2, ... that reach each other by these names, and takes them away with all in them.

    Args:
        folder: an empty one; ``home`` in it is root's home directory on all of them.
        number: how many.
    """
    home, hosts, hub = folder / "home", folder / "hosts", f"multiverso-{os.getpid()}"
    home.mkdir(parents=True)
    names = [f"node{n + 1}" for n in range(number)]
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{_NETWORK}.{n + 1} {name}\n" for n, name in enumerate(names))
    )
    with ExitStack() as stack:
        _ip("netns", "add", hub)
        stack.callback(_ip, "netns", "delete", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        made = []
        for n, name in enumerate(names):
            script = _FIRST.format(home=home, user_home=Path.home(), hosts=hosts, name=name)
            unshare = ("unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--kill-child", "--mount-proc")
            outer = subprocess.Popen(
                [*unshare, "sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(_end, outer)
            assert outer.stdout is not None
            assert outer.stdout.readline() == "ready\n", "the machine did not start"
            first = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
            cable, address = f"cable{n}", f"{_NETWORK}.{n + 1}"
            _ip("-n", hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(first))
            _ip("-n", hub, "link", "set", cable, "master", "bridge", "up")
            machine = Machine(name, address, first, (hub, cable))
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                subprocess.run(
                    ["nsenter", "-t", str(first), "-n", "ip", *words], check=True, capture_output=True
                )
            made.append(machine)
        yield made


def wait_until(condition: object, what: str, seconds: float = 30.0) -> None:
    """Waits until a function says that it is so."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
