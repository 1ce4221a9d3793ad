"""Machines of a cluster that are namespaces of this one: each has a name, a network card and processes of its own.

Daemons that are made for whole machines (sshd, munged, slurmd) run in them as they would anywhere. What the machines
share is the file system. When a machine's first process ends, the system ends all others in it, and takes its network
and its mounts away.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NETWORK = "10.77.9"
_FIRST = """
set -eu
mount --make-rprivate /
for folder in /run /dev/shm; do mount -t tmpfs none $folder; done
{mounts}
hostname {name}
echo ready
exec {python} -I -S -c '
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries those whose parents have ended
while True:
    signal.pause()
'
"""


def missing(*programs: str) -> str | None:
    """Returns what is not there of what the machines and these programs need; None where all of it is."""
    if os.geteuid():
        return "machines of namespaces can be made by root only"
    for program in ("unshare", "nsenter", "ip", "hostname", *programs):
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
        environ: what commands there find in their environment; the same dictionary of all of them.
        cable: the other end of its cable: a namespace and a device.
    """

    name: str
    address: str
    first: int
    environ: dict[str, str]
    cable: tuple[str, str]

    def command(self, *words: object, folder: object = "/") -> list[str]:
        """Returns the command that runs another there."""
        enter = ("nsenter", "-t", self.first, "-m", "-u", "-i", "-n", "-p", "--", "env", "-C", folder)
        return [str(word) for word in (*enter, *words)]

    def start(self, *words: object, folder: object = "/", **options: Any) -> subprocess.Popen[str]:
        """Starts a command there, in a session of its own; it ends with the machine."""
        command = self.command(*words, folder=folder)
        return subprocess.Popen(command, text=True, start_new_session=True, env=self.environ, **options)

    def run(self, *words: object, folder: object = "/", seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a command there to its end."""
        command = self.command(*words, folder=folder)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=self.environ)

    def processes(self, of: str) -> list[str]:
        """Returns the command lines of what runs there that have this in them."""
        lines = self.run("ps", "-eo", "stat=,args=").stdout.splitlines()
        return [line for line in lines if of in line and not line.startswith("Z")]

    def plug(self, there: bool) -> None:
        """Pulls its cable, or plugs it in again."""
        _ip("-n", self.cable[0], "link", "set", self.cable[1], "up" if there else "down")

    def end(self) -> None:
        """Ends all that runs there, at once, as when its power is cut."""
        os.kill(self.first, signal.SIGKILL)


@contextmanager
def machines(folder: Path, etc: Mapping[str, str], number: int = 2) -> Iterator[list[Machine]]:
    """Makes machines node1, node2, ... that reach each other by these names, and takes them away with all in them.

    Args:
        folder: an empty one, which they see, too; ``home`` in it is what HOME says there.
        etc: what stands in files of their /etc, which have to be here, too.
        number: how many.
    """
    (folder / "home").mkdir(parents=True)
    names = [f"node{n + 1}" for n in range(number)]
    addresses = [f"{_NETWORK}.{n + 1}" for n in range(number)]
    known = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    mounts = []
    for name, text in {**etc, "hosts": f"127.0.0.1 localhost\n{known}"}.items():
        own = folder / "etc" / name
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)
        mounts.append(f"mount --bind {shlex.quote(str(own))} /etc/{name}")
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("MULTIVERSO_", "PLATOON", "SLURM_"))
    }
    environ["HOME"] = str(folder / "home")
    environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    hub = f"multiverso-{os.getpid()}"
    with ExitStack() as stack:
        _ip("netns", "add", hub)
        stack.callback(_ip, "netns", "delete", hub)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        made_machines = []
        for name, address in zip(names, addresses, strict=True):
            first = _first_process(stack, name, "\n".join(mounts))
            cable = f"to-{name}"
            _ip("-n", hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(first))
            _ip("-n", hub, "link", "set", cable, "master", "bridge", "up")
            machine = Machine(name, address, first, environ, (hub, cable))
            machine.run("ip", "addr", "add", f"{address}/24", "dev", "eth0").check_returncode()
            for device in ("eth0", "lo"):
                machine.run("ip", "link", "set", device, "up").check_returncode()
            made_machines.append(machine)
        yield made_machines


def _first_process(stack: ExitStack, name: str, mounts: str) -> int:
    script = _FIRST.format(mounts=mounts, name=name, python=shlex.quote(sys.executable))
    unshare = ("unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--kill-child", "--mount-proc")
    outer = subprocess.Popen([*unshare, "sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)

    def end() -> None:
        outer.kill()
        outer.communicate()

    stack.callback(end)
    assert outer.stdout is not None
    assert outer.stdout.readline() == "ready\n", f"{name} did not start"
    return int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Waits until a function says that it is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
