"""What `multiverso doctor` tries: small experiments with memory, locks, waits and processes.

Each returns what it saw, and raises when the system does not do what we build on.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from multiverso.memory import mutex, words
from multiverso.memory.heap import create
from multiverso.memory.segment import Segment
from multiverso.wire import messages

SECONDS = 20.0

# Takes the lock in the inherited memory, says so, and stays until it is killed.
_HOLDER = """
import sys, time
from multiverso.memory import mutex
from multiverso.memory.segment import Segment
segment = Segment(int(sys.argv[1]))
print(mutex.lock(segment.address, 10.0), flush=True)
time.sleep(600)
"""


# Starts a worker as the launcher does, says its pid once it runs, and stays until it is killed.
_LAUNCHER = """
import os, sys, time
from multiverso.launch.processes import WorkerCommand, spawn
code = "import time; print(flush=True); time.sleep(600)"
worker = spawn(WorkerCommand((sys.executable, "-I", "-S", "-c", code), os.environ))
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""

# Sleeps while the first word of the inherited memory is 0.
_SLEEPER = """
import sys
from multiverso.cli.trials import SECONDS
from multiverso.memory import words
from multiverso.memory.segment import Segment
segment = Segment(int(sys.argv[1]))
print("sleeping", flush=True)
words.wait_for_change(segment.address, 0, SECONDS)
print("awake", words.load32(segment.address), flush=True)
"""


def shared_memory() -> str:
    """Seals a segment, hands it over a socket, and sees a change made through the other mapping."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, _memory(1 << 20) as (descriptor, first):
        messages.send(ours, {"do": "try"}, (descriptor,))
        received = messages.receive(theirs)
        assert received is not None
        try:
            second = Segment(received[1][0])
        finally:
            os.close(received[1][0])
        words.store64(second.address, 42)
        if words.load64(first.address) != 42:
            raise RuntimeError("a value written through one mapping is not seen through the other")
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return "memfd, reserved, sealed and passed over a socket"
        raise RuntimeError("a sealed segment could be cut short")


def abstract_sockets() -> str:
    """Listens at an abstract name, connects, and checks who the peer is."""
    name = f"doctor-of-multiverso-{os.getpid()}-{os.urandom(4).hex()}"
    with messages.listen(name) as server, messages.connect(name, 5.0) as client:
        accepted, _ = server.accept()
        with accepted:
            if messages.peer(accepted) != (os.getpid(), os.getuid()):
                raise RuntimeError("the kernel does not tell who is at the other end")
            messages.send(client, {"do": "try"})
            if messages.receive(accepted) != ({"do": "try"}, []):
                raise RuntimeError("a message did not arrive as it was sent")
    return "one was made, and its peer is known"


@contextmanager
def _memory(size: int = 1 << 12) -> Iterator[tuple[int, Segment]]:
    """Gives memory of its own: the descriptor, and where it is mapped here."""
    descriptor = create("doctor", size)
    try:
        yield descriptor, Segment(descriptor)
    finally:
        os.close(descriptor)


def robust_lock() -> str:
    """Kills the process that holds a lock, and gets the lock from the dead."""
    with _memory() as (descriptor, segment):
        mutex.initialise(segment.address)
        with _child(_HOLDER, descriptor) as holder:
            _expect("0", _line(holder), "the child took the lock")
            _expect(mutex.BUSY, mutex.try_lock(segment.address), "we see that it is taken")
            if mutex.owner_pid(segment.address) != holder.pid:
                raise RuntimeError("the lock does not say whose it is")
            began = time.monotonic()
            holder.send_signal(signal.SIGKILL)
            code = mutex.lock(segment.address, SECONDS)
            took = time.monotonic() - began
        _expect(mutex.OWNER_DEAD, code, "the lock of a killed holder comes back")
        mutex.recover(segment.address)
        mutex.unlock(segment.address)
        _expect(0, mutex.lock(segment.address, 1.0), "it works again")
        mutex.unlock(segment.address)
    return f"a killed holder's lock came back after {took * 1e3:.1f} ms"


def lock_deadline() -> str:
    """Waits for a lock that nobody releases, for a short time."""
    with _memory() as (_, segment):
        mutex.initialise(segment.address)
        _expect(0, mutex.lock(segment.address, 1.0), "a fresh lock is free")
        _expect(mutex.TIMED_OUT, mutex.lock(segment.address, 0.05), "the wait ends at its deadline")
        mutex.unlock(segment.address)
    return "a wait for a lock ends at its deadline"


def futex() -> str:
    """Sleeps on a word of shared memory in another process, and wakes it with FUTEX_WAKE_OP."""
    with _memory() as (descriptor, segment), _child(_SLEEPER, descriptor) as sleeper:
        _expect("sleeping", _line(sleeper), "the child is about to sleep")
        words.bump_and_wake(segment.address)
        _expect("awake 1", _line(sleeper), "the child wakes and sees the change")
    return "a process that sleeps on a shared word is woken"


def process_end() -> str:
    """Kills a launcher, and sees its worker end, too."""
    with _child(_LAUNCHER) as launcher:
        worker = os.pidfd_open(int(_line(launcher)))
        try:
            launcher.send_signal(signal.SIGKILL)
            began = time.monotonic()
            if not select.select([worker], [], [], 5.0)[0]:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
                raise RuntimeError("a worker outlived its killed launcher")
            took = time.monotonic() - began
        finally:
            os.close(worker)
    return f"a worker ended {took * 1e3:.1f} ms after its launcher was killed"


def job_of_two() -> float:
    """What the doctor's small job runs: add, meet, read."""
    import multiverso

    multiverso.init()
    table = multiverso.ArrayTableHandler(1)
    table.add([multiverso.worker_id() + 1.0])
    multiverso.barrier()
    return float(table.get()[0])


@contextmanager
def _child(code: str, *descriptors: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, descriptors)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    if not select.select([process.stdout], [], [], SECONDS)[0]:
        raise TimeoutError(f"a child said nothing for {SECONDS:g} s")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(process.stderr.read().strip().rpartition("\n")[2] or "a child ended")
    return line.strip()


def _expect(wanted: object, got: object, what: str) -> None:
    if got != wanted:
        raise RuntimeError(f"{what}: expected {wanted}, got {got}")
