"""The workers of one job, from their start to the last one's end."""

import math
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, Self

from multiverso.errors import StartupError
from multiverso.launch.output import Output
from multiverso.launch.processes import (
    HOW_TO_GET_MORE,
    Guard,
    WorkerCommand,
    catches,
    check_system,
    signal_group,
    signal_name,
    spawn,
)
from multiverso.launch.restart_policy import Pauses
from multiverso.launch.results import JobResult, Reason, WorkerExit
from multiverso.launch.signals import Signals
from multiverso.wake import Wake

OnFailure = Literal["stop", "continue"]

# A killed process that does not end is stuck in the kernel (a dead network disk); do not wait forever.
_STUCK_SECONDS = 10.0
# A signal that comes just before a wait does not interrupt it; its handler runs after it.
_LOOK_SECONDS = 0.5
# `timeout` and some terminals send a signal twice.
_SAME_SIGNAL_SECONDS = 0.2
_GIVE_UP = 0
_EXIT_CODES: dict[Reason, int] = {"timeout": 124, "output closed": 128 + signal.SIGPIPE}


@dataclass(eq=False)
class Job:
    """Starts workers, waits for them, ends them. Owned by the thread that calls `run`.

    Args:
        commands: one for each worker, in worker order.
        marker: "NAME=value", what only the environment of these workers has.
        output: reads the workers' pipes; None when all commands have files.
        on_failure: "stop" ends the job at the first failure, "continue" lets the other workers continue.
        grace_seconds: from the first request to end until SIGKILL.
        keep_stdin: let worker 0 read our standard input; the others' is empty.
        on_start: called with each worker's number and pid.
        on_exit: called at each worker's end, where it is not started again.
        again: called when a worker has failed in a job that continues: returns after how many seconds it is started
            again, or None.
        lost_workers: says which workers the node has lost, the first one first.
        on_trouble: called with what is to be said when a worker could not be started again.
        on_look: called every half second or more often.
        first: the first worker's number.
        tells: by which signals workers are told why they are to end; SIGTERM where it says nothing.

    Most callers need `run` alone. A caller with a loop of its own uses the job as a context manager, which starts the
    workers and leaves none behind, polls `fileno`, and calls `step` whenever that is readable.
    """

    commands: Sequence[WorkerCommand]
    _: KW_ONLY
    marker: str
    output: Output | None = None
    on_failure: OnFailure = "stop"
    grace_seconds: float = 1.0
    keep_stdin: bool = False
    on_start: Callable[[int, int], None] = lambda _, __: None
    on_exit: Callable[[WorkerExit], None] = lambda _: None
    again: Callable[[WorkerExit], float | None] = lambda _: None
    lost_workers: Callable[[], Sequence[int]] = tuple
    on_trouble: Callable[[str], None] = lambda _: None
    on_look: Callable[[], None] = lambda: None
    first: int = 0
    tells: Mapping[Reason, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = 0.0
        self._held = ExitStack()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._started_at: dict[int, float] = {}
        self._due: dict[int, float] = {}  # when workers that have failed are started again
        self._guard: Guard | None = None
        self._exits: dict[int, WorkerExit] = {}  # in the order in which they ended
        self._pauses: dict[int, Pauses] = {}  # of workers that could not be started again
        self._suspect: int | None = None
        self._reason: Reason = "finished"
        self._signal = 0
        self._deadline = math.inf
        self._ending_since = 0.0
        self._killing = self._given_up = False
        self._cut_short = False
        self._escalation: deque[tuple[float, int]] = deque()
        self._received: deque[int] = deque()
        self._wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        if self.output is not None:
            self.output.on_broken = self.wake

    def run(self, timeout_seconds: float | None = None, *, signals: Signals | None = None) -> JobResult:
        """Starts the workers and waits for the last one's end; leaves no process behind, whatever happens.

        Args:
            timeout_seconds: after this time the job is ended; None for no limit.
            signals: passes on what comes there to the workers; this job may not be the last one.
        """
        if signals is not None:
            signals.pass_to(self._receive)
        in_no_hurry = False
        try:
            if timeout_seconds is not None:
                self._deadline = time.monotonic() + timeout_seconds
            with self:
                self.finish()
                in_no_hurry = self._reason in ("finished", "failed", "timeout")
        finally:
            try:
                if self.output is not None:
                    self.output.close(lambda: in_no_hurry and not self._told_to_end())
            finally:
                if signals is not None:
                    signals.pass_to(None)
        return self.result()

    def __enter__(self) -> Self:
        """Starts the workers."""
        self._began = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._close)
            check_system()
            self._guard = stack.enter_context(Guard(self.marker))
            stack.callback(self._kill_all)
            self._start()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Kills what is left of the workers and of what they started."""
        self._held.close()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `step` has something to do."""
        return self._selector.fileno()

    @property
    def running(self) -> list[int]:
        """The workers that have not ended."""
        return [worker_id for worker_id in self._processes if worker_id not in self._exits]

    def watch(self, descriptor: int, read: Callable[[], bool]) -> None:
        """Has `read` called when a descriptor is readable, until it returns False."""
        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def end(self, reason: Reason = "signal", number: int = signal.SIGTERM) -> None:
        """Begins to end the workers that run: with this signal, and those that stay with SIGKILL."""
        if self._reason == "finished":
            self._signal = number
            self._end(reason, self.tells.get(reason, number))

    def finish(self) -> None:
        """Waits until all workers have ended, or one cannot be ended."""
        while (self.running or self._due) and not self._given_up:
            self.step(_LOOK_SECONDS)

    def wake(self) -> None:
        """From another thread or a signal handler: look at what happened."""
        self._wake.set()

    def _receive(self, number: int) -> None:
        self._received.append(number)
        self.wake()

    def _told_to_end(self) -> bool:
        return any(number != signal.SIGUSR1 for number in tuple(self._received))

    def _start(self) -> None:
        for worker_id in range(self.first, self.first + len(self.commands)):
            if self._told_to_end():
                break
            self._start_worker(worker_id)
        if self.output is not None:
            self.output.start()
        self._cut_short = self._told_to_end()
        if self._cut_short:
            self.step()

    def _start_worker(self, worker_id: int) -> None:
        assert self._guard is not None
        command = self.commands[worker_id - self.first]
        process: subprocess.Popen[bytes] | None = None
        try:
            process = spawn(command, keep_stdin=self.keep_stdin and worker_id == 0)
            watched = os.pidfd_open(process.pid)
        except OSError as error:  # no process or descriptor left, or no memory
            if process is not None:
                _undo(process)
            raise StartupError(f"worker {worker_id} cannot be started: {error.strerror}; {HOW_TO_GET_MORE}") from error
        self._processes[worker_id] = process
        self._exits.pop(worker_id, None)
        self._started_at[worker_id] = time.monotonic()
        self._selector.register(watched, selectors.EVENT_READ, worker_id)
        self._guard.watch(process)
        if self.output is not None and process.stdout is not None and process.stderr is not None:
            self.output.add(worker_id, process.stdout, process.stderr)
        self.on_start(worker_id, process.pid)

    def _start_due(self, now: float) -> None:
        for worker_id in [worker_id for worker_id, at in self._due.items() if at <= now]:
            del self._due[worker_id]
            if self._suspect == worker_id:
                self._suspect = None
            end = self._exits[worker_id]
            try:
                self._start_worker(worker_id)
            except StartupError as error:
                if worker_id in self.running:  # what watches over all of them is gone
                    raise
                self.on_trouble(str(error))
                if self.running:  # nothing was started: it does not count
                    pauses = self._pauses.setdefault(worker_id, Pauses())
                    self._due[worker_id] = time.monotonic() + max(_LOOK_SECONDS, pauses.after(0.0))
                else:
                    self._start_later(end)

    def _start_later(self, end: WorkerExit) -> None:
        """Starts a worker that has failed again, in a while; or gives it up."""
        seconds = self.again(end)
        if seconds is None:
            self.on_exit(end)
        else:
            self._due[end.worker_id] = time.monotonic() + seconds

    def step(self, most_seconds: float = 0.0) -> None:
        """Does what there is to do; waits for something for at most so long."""
        now = time.monotonic()
        if now >= self._deadline:
            self.end("timeout")
        if self.output is not None and self.output.broken:
            self.end("output closed")
        while self._escalation and self._escalation[0][0] <= now:
            self._signal_all(self._escalation.popleft()[1])
        times = [now + most_seconds, self._deadline, *self._due.values(), *(at for at, _ in self._escalation)]
        wait = max(0.0, min(times) - time.monotonic())
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._wake.clear()
            elif callable(key.data):
                if not key.data():
                    self._selector.unregister(key.fileobj)
            else:
                self._reap(key)
        while self._received:
            self._handle(self._received.popleft())
        self._start_due(time.monotonic())
        self.on_look()

    def _handle(self, number: int) -> None:
        if number == signal.SIGUSR1:
            for worker_id in self.running:
                # Its default action would end a worker that has not come to init() yet.
                if catches(self._processes[worker_id].pid, number):
                    self._processes[worker_id].send_signal(number)
        elif self._reason == "finished":
            if number == signal.SIGINT and self.output is not None:
                self.output.interrupted()
            self._signal = number
            # An interpreter that is interrupted while it starts itself says "Fatal Python error".
            young = self._cut_short and number == signal.SIGINT
            self._end("signal", signal.SIGTERM if young else number)
        elif time.monotonic() - self._ending_since > _SAME_SIGNAL_SECONDS:
            self._end(self._reason, signal.SIGKILL)

    def _end(self, reason: Reason, first: int) -> None:
        """Begins to end the workers: with the first signal now, and harder ones where it does not help.

        After Ctrl-C they get SIGINT now, SIGTERM when half of the grace is over, and SIGKILL when all of it is. Any
        other end begins with SIGTERM. A second Ctrl-C (or SIGTERM), over 0.2 s after the first, kills them at once.

        Args:
            reason: why.
            first: the signal to begin with.
        """
        now = time.monotonic()
        self._reason, self._ending_since = reason, now
        self._deadline = math.inf
        self._due.clear()
        steps: list[tuple[float, int]] = [(now, first)]
        if first == signal.SIGINT:
            steps.append((now + self.grace_seconds / 2, signal.SIGTERM))
        if first != signal.SIGKILL:
            steps.append((now + self.grace_seconds, signal.SIGKILL))
        self._escalation = deque([*steps, (steps[-1][0] + _STUCK_SECONDS, _GIVE_UP)])

    def _signal_all(self, number: int) -> None:
        if number == _GIVE_UP:
            self._given_up = True
            return
        self._killing |= number == signal.SIGKILL
        for worker_id in self.running:
            if number == signal.SIGTERM and self._reason == "failed" and worker_id == self._suspect:
                continue  # it is about to end, and how it does is what its user wants to know
            signal_group(self._processes[worker_id], number)

    def _reap(self, key: selectors.SelectorKey) -> None:
        worker_id: int = key.data
        process = self._processes[worker_id]
        if self._suspect is None and self._reason == "finished":
            self._suspect = next(iter(self.lost_workers()), None)
        # Still a zombie, so its number is its own: end what it started in its group before it is given back.
        signal_group(process, signal.SIGKILL)
        code = process.wait()
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        killed_by_others = self._reason == "failed" and code == -signal.SIGKILL and not self._killing
        ending = self._reason != "finished" and worker_id != self._suspect and not killed_by_others
        end = WorkerExit(
            worker_id,
            process.pid,
            128 - code if code < 0 else code,
            signal_name(-code) if code < 0 else None,
            ended_by_us=code != 0 and ending,
            seconds=time.monotonic() - self._started_at[worker_id],
            host=self.commands[worker_id - self.first].host,
        )
        self._exits[worker_id] = end
        if end.failed and self.on_failure == "continue" and self._reason == "finished":
            self._start_later(end)
            return
        self.on_exit(end)
        if end.failed and self.on_failure == "stop":
            self.end("failed")

    def _kill_all(self) -> None:
        for worker_id in self.running:
            signal_group(self._processes[worker_id], signal.SIGKILL)
        if not self._given_up:
            for worker_id in self.running:
                try:
                    self._processes[worker_id].wait(_STUCK_SECONDS)
                except subprocess.TimeoutExpired:
                    pass

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.data, int):
                os.close(key.fd)
        self._selector.close()
        self._wake.close()

    def result(self) -> JobResult:
        """Returns how the workers ended."""
        ends = list(self._exits.values())
        # What the node lost first made the others fail, even when their end was seen before its own; and what was
        # killed did not fail because of another one.
        stops, lost = self.on_failure == "stop", list(self.lost_workers())

        def place(end: WorkerExit) -> tuple[bool, bool, int]:
            in_consequence = end.worker_id != self._suspect and end.signal != "SIGKILL"
            seen = lost.index(end.worker_id) if end.worker_id in lost else len(lost)
            return in_consequence, stops and end.signal is None, seen

        failures = sorted((end for end in ends if end.failed), key=place)
        culprit = failures[0] if failures else None
        if self._reason == "signal":
            code = 128 + self._signal
        elif self._reason in _EXIT_CODES:
            code = _EXIT_CODES[self._reason]
        elif culprit and (self.on_failure == "stop" or all(end.code for end in ends)):
            code = culprit.code
        else:
            code = 0
        left = [end for end in ends if culprit and end.worker_id == self._suspect and end.code == 0]
        # one that was lost and started again has not left the job
        deserter = next((end for end in left if end.worker_id in lost), None)
        exits = tuple(sorted(ends, key=lambda end: end.worker_id))
        seconds = time.monotonic() - self._began
        return JobResult(self._reason, code, culprit, deserter, exits, seconds, tuple(failures[1:]))


def _undo(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker that was started in vain."""
    signal_group(process, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
