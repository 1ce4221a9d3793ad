"""Notices a worker's death, or its leaving: a thread sleeps on the mutex that the worker holds for its life.

The worker's side is ``liveness.py``. The kernel releases a robust mutex when its owner's process ends, however it ends,
and wakes whatever sleeps on it, within a millisecond. A worker that does not hold its mutex yet is known by its
process alone, and that by a descriptor (pidfd) which is readable once the process has ended.

What watches posts it to the node's thread.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass

from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.runtime.job.control import Control

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """A worker's life lock is released: it has left, or is lost (``how``: `at.GONE`, `at.LOST`)."""

    worker_id: int
    life: int
    how: int


class Deaths:
    """Watches the workers of this host.

    Args:
        post: gets what has `Ended`; by any thread.
        closing: whether the node is about to end; called by any thread.

    Owner: the node's maker opens it, and joins its threads; all else is the node's thread's.
    """

    def __init__(self, post: Callable[[Ended], None], closing: Callable[[], bool]) -> None:
        self._post, self._closing = post, closing
        self._processes: dict[int, tuple[int, int]] = {}  # by descriptor: a worker's number and its process
        self._watchers: list[threading.Thread] = []
        self._withdrawn: set[int] = set()  # lives

    def open(self, poll: select.epoll) -> None:
        """Sets what polls the processes' descriptors: the node's."""
        self._poll = poll

    def close(self) -> None:
        """Watches processes no longer. In a forked child too, where a copy of a descriptor would stay open."""
        while self._processes:
            os.close(self._processes.popitem()[0])  # not unregistered: what a child has is its parent's epoll

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
        """Sleeps until a worker's life lock is released or its owner is dead, and says so to all who wait."""
        address = control.block(worker_id) + at.LIFE
        code = mutex.TIMED_OUT
        while code == mutex.TIMED_OUT and not self._closing():
            code = mutex.lock(address, _LOOK_SECONDS)
        if code == mutex.TIMED_OUT:
            return
        left = False
        if code in (0, mutex.OWNER_DEAD):  # it is held
            if code == mutex.OWNER_DEAD:
                mutex.recover(address)
            left = control.participation(worker_id) == at.LEFT
            mutex.unlock(address)
        if life not in self._withdrawn:
            # the word is set here and now: waiters must not depend on what else the node has to do
            how = at.GONE if left else at.LOST
            control.settle(worker_id, how)
            self._post(Ended(worker_id, life, how))

    # -- by their process ------------------------------------------------------------------------------------

    def watch_process(self, worker_id: int, pid: int) -> bool:
        """Begins to watch a worker's process. Its socket says nothing: a child of it may hold that open.

        Returns:
            Whether that can be done.
        """
        if (worker_id, pid) in self._processes.values():
            return True
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended, or there is none left, or this kernel has no such thing
            return False
        self._processes[descriptor] = worker_id, pid
        self._poll.register(descriptor, select.EPOLLIN)
        return True

    def ended_process(self, descriptor: int) -> tuple[int, int] | None:
        """Returns a worker and its process that has ended, if that is what a descriptor says; watches it no longer."""
        if descriptor not in self._processes:
            return None
        # asked, as it may say so of another thing, closed since, that had the same number; and not of the process by
        # its number, which may be another one's by now
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return self._forget(descriptor) if poll.poll(0) else None

    def forget_process(self, worker_id: int) -> None:
        """Watches a worker's process no longer: its life lock reports its end sooner, or it has no place any more."""
        for descriptor in [d for d, (other, _) in self._processes.items() if other == worker_id]:
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> tuple[int, int]:
        # or it would be polled on as long as a child that is about to begin another program has a copy
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._processes.pop(descriptor)
