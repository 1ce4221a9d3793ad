"""A job's work in pieces: handed out to the workers on demand, shown while it runs, and saved now and then."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import multiverso as mv
from multiverso.errors import MultiversoError

SHOWN = {"show_default": True, "max_content_width": 110}  # by the help of these programs


def start(main: click.Command) -> None:
    """Runs a program by its command line; what the job cannot do is a sentence on standard error, and exit code 1."""
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:  # Ctrl-C; but click says the same of a file that ends too early
        if isinstance(error.__cause__, EOFError):
            raise error.__cause__ from None
        sys.exit(128 + signal.SIGINT)
    except MultiversoError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def _bar() -> Any:
    """Returns tqdm's class, without the thread that it would start for bars that rest."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError('the progress bar needs tqdm: pip install "multiverso[apps]"', name="tqdm") from error
    return type("Bar", (tqdm,), {"monitor_interval": 0})


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[bool]:
    """Yields whether this process is the only one in; the system lets the next in when it is killed."""
    with open(directory / ".lock", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def once(directory: Path, is_done: Callable[[], bool], do: Callable[[], None]) -> None:
    """Has one worker do something, and returns in all of them when it is done: collective.

    If that worker is killed meanwhile, and the job continues without it, another one does it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        with _alone_in(directory) as mine:
            if mine and not is_done():
                do()
        mv.barrier()
        if is_done():
            return


class Work:
    """Pieces of work, each done once in each epoch.

    A piece that a killed worker had begun is dealt again. Which are done is a table, too, and is saved with all others,
    before those of rows that are made after it: what is done while they are saved is at worst done again after a
    resume, and is never left out. Any worker may be the one that saves, so that nobody's death ends it.

    Args:
        directory: of the saves, one run's alone.
        pieces: how many there are.
        epochs: how often each is done.
        save_seconds: saves when the last save is so old.
        what: what the progress bar is called.
        unit: what `count` counts.
    """

    def __init__(self, directory: Path, pieces: int, epochs: int, *, save_seconds: float, what: str, unit: str) -> None:
        self._directory, self._save_seconds, self._what = directory, save_seconds, what
        self._saved = directory / "saved"
        self._done = mv.MatrixTableHandler(pieces, 1, dtype="int64", name="pieces-done")
        self._pieces, self._epochs = pieces, epochs
        self.note = ""  # shown at the bar's end
        self._counter, self._unit = mv.Counter(unit), unit
        self._loaded, self._ended = mv.Counter("loaded"), mv.Counter("ended")
        self._latest = time.monotonic()

    def resume(self) -> None:
        """Gives all tables what was saved, if anything was: collective, once all are made."""
        if (self._saved / "manifest.json").exists():  # nobody saves before all have begun to iterate
            once(self._directory, lambda: self._loaded.value > 0, self._load)

    @property
    def done(self) -> int:
        """How many pieces are done, in all epochs."""
        return int(self._done.view().sum())

    @property
    def fraction(self) -> float:
        """How much of all epochs' work is done, from 0 to 1."""
        return min(self.done / (self._pieces * self._epochs), 1.0)

    def __iter__(self) -> Iterator[int]:
        """Yields this worker's pieces; ends when all workers have done all. Saves on the way, and at the end."""
        done, ended = self._done.snapshot()[:, 0], self._ended.value
        mv.barrier()  # all have seen both before any of them continues
        began, before = time.perf_counter(), self._counter.value
        shown = mv.is_master_worker()
        with _bar()(
            total=self._pieces * self._epochs, initial=int(done.sum()), desc=self._what, disable=not shown
        ) as bar:
            for epoch in range(int(done.min()), self._epochs):
                left = np.flatnonzero(done <= epoch)
                for batch in mv.batches(len(left), 1, seed=epoch):
                    piece = int(left[batch[0]])
                    yield piece
                    self._done.add([[1]], row_ids=[piece])
                    if time.monotonic() - self._latest > self._save_seconds:
                        self._save()
                    if shown:
                        rate = (self._counter.value - before) / (time.perf_counter() - began)
                        bar.set_postfix_str(f"{rate:,.0f} {self._unit}/s{self.note}", refresh=False)
                        bar.update(self.done - bar.n)
                done = np.maximum(done, epoch + 1)
            if shown:
                bar.update(bar.total - bar.n)
        once(self._directory, lambda: self._ended.value > ended, self._save_all)

    def count(self, number: int) -> None:
        """Counts what has been done, in ``unit``, for the bar's rate and `counted`."""
        self._counter.fetch_add(number)

    @property
    def counted(self) -> int:
        """What all workers have counted since the job began."""
        return self._counter.value

    # -- saving ------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        mv.load(self._saved)
        self._loaded.fetch_add()

    def _save(self) -> None:
        with _alone_in(self._directory) as mine:
            if mine:
                mv.save(self._saved)
        self._latest = time.monotonic()  # if another one has the lock, it is saving

    def _save_all(self) -> None:
        mv.save(self._saved)
        self._ended.fetch_add()
