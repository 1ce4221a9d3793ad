"""How the node notices a worker's death, or its leaving: it sleeps on the mutex that the worker holds for its life.

The worker's side is ``liveness.py``. The kernel releases a robust mutex when its owner's process ends, however it ends,
and wakes whatever sleeps on it, within a millisecond. A worker that does not hold its mutex yet is known by its
process alone, and that by a descriptor (pidfd) which is readable once the process has ended.

What watches posts to the node's thread, in its mailbox, as all other threads do.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.runtime.job.control import Control
from multiverso.wake import Wake

End = Literal["left", "lost", "absent"]


class Mailbox:
    """Any thread posts; the node's thread reads. Owner: the node's maker opens and closes it."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[tuple[End, int, int]] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Wake | None = None

    def open(self) -> None:
        """Makes the socket. What is posted before is not lost."""
        self._wake = Wake()

    def close(self) -> None:
        """Closes it; later posts are dropped."""
        if self._wake is not None:
            self._wake.close()

    def fileno(self) -> int:
        """The descriptor that is readable while something was posted."""
        assert self._wake is not None
        return self._wake.fileno()

    def poke(self) -> None:
        """Wakes the node's thread, to look at what has changed."""
        if self._wake is not None:
            self._wake.set()

    def post_order(self, order: Any) -> None:
        """Posts what is to be done: an order of the coordinator's, or something to call."""
        self._orders.put(order)
        self.poke()

    def post_end(self, how: End, worker_id: int, life: int = 0) -> None:
        """Posts how a worker's life has ended, or that its process is gone for good (``"absent"``)."""
        self._ends.put((how, worker_id, life))
        self.poke()

    def clear(self) -> None:
        """Before reading: what is posted from here on wakes the node's thread again."""
        assert self._wake is not None
        self._wake.clear()

    def orders(self) -> Iterator[Any]:
        """Yields the orders there are, each once."""
        while not self._orders.empty():
            yield self._orders.get()

    def ends(self) -> Iterator[tuple[End, int, int]]:
        """Yields how lives have ended, each once: what happened, to which worker, in which of its lives."""
        while not self._ends.empty():
            yield self._ends.get()


_LOOK_SECONDS = 1.0


class Deaths:
    """Watches the workers of this host.

    Args:
        mailbox: gets ``"left"`` or ``"lost"`` when a worker's life lock is released.
        closing: whether the node is about to end; called by any thread.

    Owner: the node's maker opens it, and joins its threads; all else is the node's thread's.
    """

    def __init__(self, mailbox: Mailbox, closing: Callable[[], bool]) -> None:
        self._mailbox = mailbox
        self._closing = closing
        self._poll: select.epoll | None = None
        self._processes: dict[int, tuple[int, int]] = {}  # by descriptor: a worker's number and its process
        self._watchers: list[threading.Thread] = []
        self._withdrawn: set[int] = set()  # lives

    def open(self) -> None:
        """Makes what is polled."""
        self._poll = select.epoll()

    def fileno(self) -> int:
        """The descriptor that is readable when a watched process has ended."""
        assert self._poll is not None
        return self._poll.fileno()

    def close(self) -> None:
        """Watches processes no longer. In a forked child too, where a copy of a descriptor would stay open."""
        for descriptor in list(self._processes):
            self._forget(descriptor)
        if self._poll is not None:
            self._poll.close()

    def join(self) -> None:
        """Waits until its threads have ended, once the node is about to."""
        for watcher in self._watchers:
            watcher.join()

    # -- by their life lock ---------------------------------------------------------------------------------

    def watch_life(self, control: Control, worker_id: int, life: int) -> None:
        """Begins to sleep on a worker's life lock, which it holds from here on.

        Args:
            control: the control segment of its run.
            worker_id: which worker.
            life: a number that no other worker, nor this one before or after, is watched under.
        """
        watcher = threading.Thread(
            target=self._await_end, args=(control, worker_id, life), name=f"multiverso-watch-{worker_id}", daemon=True
        )
        watcher.start()
        self._watchers = [t for t in self._watchers if t.is_alive()] + [watcher]

    def withdraw(self, life: int) -> None:
        """A worker gives its life lock back and is not lost: what happens to the mutex means nothing."""
        self._withdrawn.add(life)

    def _await_end(self, control: Control, worker_id: int, life: int) -> None:
        how = await_end(control, worker_id, self._closing, lambda: life in self._withdrawn)
        if how is not None:
            self._mailbox.post_end(how, worker_id, life)

    # -- by their process ------------------------------------------------------------------------------------

    def watch_process(self, worker_id: int, pid: int) -> bool:
        """Begins to watch a worker's process. Its socket says nothing: a child of it may hold that open.

        Returns:
            Whether that can be done.
        """
        if (worker_id, pid) in self._processes.values():
            return True
        assert self._poll is not None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended, or there is none left, or this kernel has no such thing
            return False
        self._processes[descriptor] = worker_id, pid
        self._poll.register(descriptor, select.EPOLLIN)
        return True

    def ended_processes(self) -> list[tuple[int, int]]:
        """Returns workers and their processes that have ended, and watches them no longer."""
        assert self._poll is not None
        # one that is closed here is polled on as long as a child that is about to begin another program has a copy
        ended = [descriptor for descriptor, _ in self._poll.poll(0) if descriptor in self._processes]
        found = [self._processes[descriptor] for descriptor in ended]
        for descriptor in ended:
            self._forget(descriptor)
        return found

    def forget_process(self, worker_id: int) -> None:
        """Watches a worker's process no longer: its life lock reports its end sooner, or it has no place any more."""
        for descriptor in [d for d, (other, _) in self._processes.items() if other == worker_id]:
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        del self._processes[descriptor]
        os.close(descriptor)  # and epoll forgets it


def await_end(
    control: Control, worker_id: int, closing: Callable[[], bool], withdrawn: Callable[[], bool]
) -> Literal["left", "lost"] | None:
    """Sleeps until a worker's life lock is released or its owner is dead, and says so to all who wait.

    Args:
        control: the control segment of its run.
        worker_id: which worker.
        closing: whether the node is about to end.
        withdrawn: whether the mutex is given back by a worker that is not lost.

    Returns:
        How it ended; None where it has not, or where that means nothing.
    """
    address = control.block(worker_id) + at.LIFE
    code = mutex.TIMED_OUT
    while code == mutex.TIMED_OUT and not closing():
        code = mutex.lock(address, _LOOK_SECONDS)
    if code == mutex.TIMED_OUT:
        return None
    if code == mutex.OWNER_DEAD:
        mutex.recover(address)
    is_held = code in (0, mutex.OWNER_DEAD)
    if withdrawn():
        if is_held:
            mutex.unlock(address)
        return None
    left = is_held and control.participation(worker_id) == at.LEFT
    if is_held:
        mutex.unlock(address)
    # the word is set here and now: waiters must not depend on what else the node has to do
    control.settle(worker_id, at.GONE if left else at.LOST)
    return "left" if left else "lost"
