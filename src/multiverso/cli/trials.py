"""What `multiverso doctor` tries: small experiments with memory, locks, waits and processes.

Each returns what it saw, and raises when the system does not do what we build on.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from multiverso.memory import mutex, words
from multiverso.memory.heap import create
from multiverso.memory.segment import Segment
from multiverso.wire import messages

SECONDS = 20.0

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
    """Lets a thread end that holds a lock, as a killed one does, and gets the lock from the dead."""
    with _memory() as (_, segment):
        mutex.initialise(segment.address)
        holder = threading.Thread(target=mutex.lock, args=(segment.address, 1.0))
        holder.start()
        holder.join()
        _expect(
            mutex.OWNER_DEAD, mutex.lock(segment.address, SECONDS), "the lock of a holder that has ended comes back"
        )
        mutex.recover(segment.address)
        mutex.unlock(segment.address)
        _expect(0, mutex.lock(segment.address, 1.0), "it works again")
        mutex.unlock(segment.address)
    return "a lock came back whose holder had ended"


def lock_deadline() -> str:
    """Waits for a lock that nobody releases, for a short time."""
    with _memory() as (_, segment):
        mutex.initialise(segment.address)
        _expect(0, mutex.lock(segment.address, 1.0), "a fresh lock is free")
        _expect(mutex.TIMED_OUT, mutex.lock(segment.address, 0.05), "the wait ends at its deadline")
        mutex.unlock(segment.address)
    return "a wait for a lock ends at its deadline"


def futex() -> str:
    """Sleeps on a word of shared memory, and is woken by way of another mapping, as processes wake each other."""
    with _memory() as (descriptor, segment):
        there = Segment(descriptor)
        sleeper = threading.Thread(target=words.wait_for_change, args=(there.address, 0, 2 * SECONDS), daemon=True)
        sleeper.start()
        words.bump_and_wake(segment.address)
        sleeper.join(SECONDS)
        _expect((False, 1), (sleeper.is_alive(), words.load32(there.address)), "the sleeper wakes and sees the change")
    return "who sleeps on a shared word is woken"


def process_end() -> str:
    """Kills a launcher, and sees its worker end, too."""
    command = [sys.executable, "-P", "-c", _LAUNCHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            worker = os.pidfd_open(int(_line(launcher)))
        finally:
            launcher.kill()
        began = time.monotonic()
        try:
            if not select.select([worker], [], [], 5.0)[0]:
                signal.pidfd_send_signal(worker, signal.SIGKILL)
                raise RuntimeError("a worker outlived its killed launcher")
        finally:
            os.close(worker)
    return f"a worker ended {(time.monotonic() - began) * 1e3:.1f} ms after its launcher was killed"


def job_of_two() -> float:
    """What the doctor's small job runs: add, meet, read."""
    import multiverso

    multiverso.init()
    table = multiverso.ArrayTableHandler(1)
    table.add([multiverso.worker_id() + 1.0])
    multiverso.barrier()
    return float(table.get()[0])


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
