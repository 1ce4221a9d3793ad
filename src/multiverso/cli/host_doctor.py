"""`multiverso doctor --hosts a,b`: can these hosts run a job together? Tried as a job would do it.

A probe (`host_probe`) runs on each, started over ssh in the same folder and with the same interpreter as here, as
``multiverso run --hosts`` starts its launchers.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from multiverso.cli.doctor import Finding, State
from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.launch.processes import end_process
from multiverso.launch.ssh import addresses_of, checked_names, checked_ssh, command_line

_START_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_CLOCKS_SECONDS = 1.0
_PINGS = 3
_ROW_BYTES = 256 + 40  # of 64 float32: in the table, and in its index at most
_FETCH_MS = 0.5  # of the nodes, beside the network: docs/experiments.md
# What ssh has started may hold its output open after its end: a connection that it shares, a way by another host.
_LEFT_OPEN_SECONDS = 1.0
VERDICTS = ("These hosts can run a job together.", "These hosts cannot run a job together yet.")
# By what ssh, or the shell there, says.
_ADVICE = {
    "Host key verification failed": "The first time: `ssh {host}` from here, and answer yes. Where it has changed: "
    "ask why, then `ssh-keygen -R {host}`.",
    "Permission denied (": "It has to let you in without a password: `ssh-keygen` once, then `ssh-copy-id {host}`.",
    "Could not resolve": "Is that its name? It has to be one for ssh (/etc/hosts, DNS, ~/.ssh/config).",
    "Connection refused": "Is an ssh server running there? For another port: --ssh 'ssh -o BatchMode=yes -p 2222'.",
    "cd:": "The same folder has to be there as here: {folder}.",
    "No module named": "Install multiverso there as it is installed here, into the environment of {python}.",
    "No such file": "The same interpreter has to be there as here, with multiverso installed: {python}.",
}
_NO_PROBE = (
    "ssh has to get there without a password, and find this folder ({folder}) and this interpreter ({python}) with "
    "multiverso installed."
)


class Probe:
    """One host's probe. Used in a ``with``.

    Args:
        host: its name.
        address: where the other hosts reach it.
        ssh: what reaches it from here.
        port: where it is to listen besides; 0 for nowhere.
    """

    def __init__(self, host: str, address: str, ssh: list[str], port: int = 0) -> None:
        self.host = host
        self.address = address
        self.said: dict[str, Any] = {}
        self.why = ""
        python = (sys.executable, "-P", "-m", "multiverso", "doctor", "--probe", str(port))
        variables = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if os.environ.get("PYTHONPATH") else []
        there = command_line(python, variables)
        self._way, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*ssh, host, there], stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE
            )
        self._answers = self._way.makefile("rb")

    def meet(self) -> None:
        """Waits for what it says of itself."""
        self.said = self._receive(_START_SECONDS)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns its answer; nothing when there is none."""
        try:
            self._way.sendall(json.dumps(question).encode() + b"\n")
        except OSError:
            self._give_up("its probe has ended")
            return {}
        return self._receive(_ANSWER_SECONDS)

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline, said = Deadline.after(seconds), b""
        self._way.settimeout(seconds)
        try:
            for said in self._answers:
                with contextlib.suppress(ValueError):  # what a shell there greets us with, perhaps
                    answer = json.loads(said)
                    if isinstance(answer, dict):
                        return answer
                if deadline.passed:
                    raise TimeoutError
            self._give_up("its probe ended", said)
        except TimeoutError:
            self._give_up(f"it did not answer within {seconds:g} s", said)
        return {}

    def _give_up(self, why: str, said: bytes = b"") -> None:
        self._process.kill()
        try:
            words = self._process.communicate(timeout=_LEFT_OPEN_SECONDS)[1]
        except subprocess.TimeoutExpired as error:
            words = error.stderr or b""
        lines = (words or said).decode(errors="replace").strip().splitlines()
        self.why = f"{why}: {lines[-1]}" if lines else why
        self.said = {}

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *error: object) -> None:
        self._answers.close()
        self._way.close()
        end_process(self._process, 5.0)
        assert self._process.stderr is not None
        self._process.stderr.close()


def examine_hosts(hosts: str, ssh: str, port: int) -> Iterator[Finding]:
    """Tries what a job on these hosts needs.

    Args:
        hosts: their names, with commas between them, in the order in which a job would have them.
        ssh: the command that reaches one.
        port: where the first would listen for the others.

    Raises:
        StartupError: these are not hosts' names, or there is no ssh.
    """
    if hosts.isdecimal() or "," not in hosts:
        raise StartupError(f"--hosts {hosts}: give two names or more, with commas between them.")
    names, command = checked_names("--hosts", hosts.split(",")), checked_ssh(ssh)
    addresses = addresses_of(names, command)
    with contextlib.ExitStack() as stack:
        probes = [
            stack.enter_context(Probe(name, address, command, port if name == names[0] else 0))
            for name, address in zip(names, addresses, strict=True)
        ]
        for probe in probes:
            probe.meet()
            yield _found(probe)
        there = [probe for probe in probes if probe.said]
        if len(there) > 1:
            yield compare_versions(there)
            yield compare_encryption(there)
            yield compare_clocks(there)
            took: list[float] = []
            yield from _ways(probes, port, took)
            yield cost_of_rows(there, took)


def _found(probe: Probe) -> Finding:
    name = f"host {probe.host}"
    if not probe.said:
        advice = next((words for sign, words in _ADVICE.items() if sign in probe.why), _NO_PROBE)
        advice = advice.format(host=probe.host, python=sys.executable, folder=os.getcwd())
        return Finding(name, "fail", probe.why, advice)
    said = probe.said
    return Finding(name, "ok", f"{said['name']}, {said['cores']} cores, {said['machine']}, at {said['address']}")


def compare_versions(probes: list[Probe]) -> Finding:
    """Tells whether all hosts have the same versions of what has to be the same."""
    different: list[str] = []
    state: State = "ok"
    first = probes[0].said["versions"]
    for package in first:
        others = {probe.host: probe.said["versions"].get(package) for probe in probes}
        if len(set(others.values())) > 1:
            different.append(f"{package}: " + ", ".join(f"{there} on {host}" for host, there in others.items()))
            state = "fail" if package == "multiverso" else "warn" if state == "ok" else state
    if not different:
        return Finding("versions", "ok", ", ".join(f"{package} {version}" for package, version in first.items()))
    return Finding("versions", state, "; ".join(different), "Install the same versions on all hosts.")


def compare_encryption(probes: list[Probe]) -> Finding:
    """Tells whether all hosts have what encrypts the connections between them."""
    needed = ("pyopenssl", "cryptography")
    without = [p.host for p in probes if any(p.said["versions"].get(package) is None for package in needed)]
    if not without:
        return Finding("encryption", "ok", "pyOpenSSL and cryptography are on all hosts")
    advice = 'pip install "multiverso[hosts]" there, or start with --insecure-fabric on a network that you trust.'
    return Finding("encryption", "fail", f"{', '.join(without)} cannot encrypt", advice)


def compare_clocks(probes: list[Probe]) -> Finding:
    """Nothing of ours goes by the time of day, but logs are read side by side."""
    ahead: dict[str, float] = {}
    for probe in probes:
        best = float("inf")
        for number in range(_PINGS):
            before = time.time()
            there = probe.ask({"ping": number}).get("time")
            after = time.time()
            if there is not None and after - before < best:
                best = after - before
                ahead[probe.host] = float(there) - (before + after) / 2
    if len(ahead) < 2:
        return Finding("clocks", "warn", "they could not be compared", "Try again.")
    apart = max(ahead.values()) - min(ahead.values())
    if apart <= _CLOCKS_SECONDS:
        return Finding("clocks", "ok", f"at most {max(apart, 0.001):.3f} s apart")
    latest = max(ahead, key=lambda host: ahead[host])
    text = f"{latest} is {apart:.1f} s ahead of {min(ahead, key=lambda host: ahead[host])}"
    return Finding("clocks", "warn", text, "Training does not mind; logs are easier to read with NTP.")


def cost_of_rows(probes: list[Probe], took: list[float]) -> Finding:
    """Tells what a `KeyedTable` may have and costs on these hosts, each of which has as many of its rows.

    Args:
        probes: the hosts'.
        took: seconds of round trips between them.
    """
    least = min(probes, key=lambda probe: probe.said["free"])
    free = least.said["free"]
    rows = len(probes) * free / _ROW_BYTES / 1e6
    text = f"some {rows:,.0f} million rows of 64 float32 in a KeyedTable, half with copies=2"
    if took:
        text += f"; to fetch one takes {1e3 * max(took) + _FETCH_MS:.1f} ms or more"
    return Finding("rows by key", "ok", f"{text} ({least.host} has the least memory: {free / 1e9:.1f} GB)")


def _ways(probes: list[Probe], port: int, took: list[float]) -> Iterator[Finding]:
    """Each host connects to those before it: to the first at its port, and to all where the system puts them."""
    lead, *_ = probes
    for host, probe in enumerate(probes):
        if not probe.said:
            continue
        if not probe.said["ports"]:
            yield Finding(f"to {probe.host}", "fail", probe.said["trouble"], "Give another --port.")
            continue
        places = [[probe.address, number] for number in probe.said["ports"]]
        trouble: list[str] = []
        for other in probes[host + 1 :]:
            if not other.said:
                continue
            answer = other.ask({"reach": places})
            reached = answer.get("reached", ["no answer"])
            took += [answer["seconds"]] if answer.get("seconds") else []
            trouble += [
                f"{other.host} cannot reach {address}:{number}: {why}"
                for (address, number), why in zip(places, reached, strict=False)
                if why is not None
            ]
        if trouble:
            advice = (
                "Let the hosts of a job reach each other at all ports (each listens for values at one that the system "
                "chooses), by the names that you give."
            )
            yield Finding(f"to {probe.host}", "fail", "; ".join(trouble), advice)
        elif any(other.said for other in probes[host + 1 :]):
            where = f"port {port} and others" if probe is lead else "the ports that the system chooses"
            yield Finding(f"to {probe.host}", "ok", f"the hosts after it reach {where}")
