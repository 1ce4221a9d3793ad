"""The options of a job that its workers give to ``init``: the same in all of them."""

from __future__ import annotations

from multiverso.errors import StartupError
from multiverso.hosts.options import ExchangeOptions
from multiverso.spec.modes import MODES, ConsistencyMode
from multiverso.spec.table import TableSpec
from multiverso.wire.messages import Message


def _words(options: Message) -> str:
    consistency = options["consistency"]
    bound = f" (staleness={consistency['staleness']})" if MODES[consistency["mode"]].has_clocks else ""
    bound += f" of {consistency['quorum']}" if consistency.get("quorum") else ""
    between = f", {ExchangeOptions.from_message(options['exchange'])}" if "exchange" in options else ""
    return f"{consistency['mode']}{bound} with on_lost={options['on_lost']!r}{between}"


def differ(options: Message, others: Message) -> StartupError:
    """Returns the error for a worker that asks for other options than the workers before it."""
    return StartupError(
        f"this worker asks for {_words(options)}, the others for {_words(others)}: "
        "call init with the same arguments everywhere"
    )


def check_exchange(mode: ConsistencyMode, exchange: ExchangeOptions) -> None:
    """Refuses ways for tables to travel that the consistency has no use for, on however many hosts.

    Raises:
        StartupError: a synchronous job is to have one.
    """
    if mode.in_rounds and exchange != ExchangeOptions(wire=exchange.wire):
        raise StartupError(
            f"with sync=True every round exchanges all that was added, and init has {exchange} beside it: "
            "leave every= and between= (or MULTIVERSO_EVERY and _BETWEEN) out"
        )


def check_table(mode: ConsistencyMode, spec: TableSpec) -> None:
    """Refuses a way to travel of a table's own, where `check_exchange` refuses one for the job.

    Raises:
        StartupError: a table of a synchronous job is to have one.
    """
    if mode.in_rounds and spec.every:
        raise StartupError(
            f"with sync=True every round exchanges all that was added, and a table has every={spec.every!r}: "
            "leave that out, or begin without sync=True"
        )


def begun_twice() -> StartupError:
    """Returns the error for a worker of a job on several hosts that has left it, or died, and returns."""
    return StartupError(
        "a job on several hosts cannot begin a second time: call init once and shutdown once in it, and start another "
        "job for what follows, or run it on one host"
    )


def too_late(worker_id: int) -> StartupError:
    """Returns the error for a process that takes a dead worker's place in a job that is over."""
    return StartupError(
        f"this process takes the place of worker {worker_id}, which died in a job that is over: the others have left "
        "it and called init again since, and this one would begin at the first line among them"
    )
