"""Why a worker does not get a table or plain memory."""

from __future__ import annotations

from multiverso import errors
from multiverso.errors import MultiversoError, TableMismatchError, WorkerLostError
from multiverso.hosts.control.messages import Drop
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.node.catalogue import Key, Piece, Spec, words
from multiverso.spec.table import TableSpec


def lost_error(lost: list[int], when: str) -> WorkerLostError:
    """Returns the error for those that waited for a lost worker."""
    return WorkerLostError(f"{names(lost)} died, or exited without shutdown(), {when}", lost)


def check_equal(made: Piece, asked: Spec) -> None:
    """Raises TableMismatchError where a worker has asked for something else than what there is."""
    if made.spec != asked:
        raise another(made, asked)


def another(made: Piece, asked: Spec) -> TableMismatchError:
    """Returns the error for a worker that has asked for something else."""
    return TableMismatchError(
        f"{words(made.key)} is {made.spec}; this worker asked for {asked}. All workers must create the same "
        "tables in the same order, or by the same names"
    )


def differ(key: Key, who: str, each: str) -> TableMismatchError:
    """Returns the error for workers, or hosts, that have asked for different things."""
    return TableMismatchError(
        f"{words(key)} differs between {who} ({each}). All workers must create the same tables in the "
        "same order; nothing was created, and the call can be repeated"
    )


def error_of(order: Drop) -> MultiversoError:
    """Returns the error for those that wait for a table which cannot be made."""
    if order.specs:
        each = "; ".join(f"{host}: {TableSpec.from_message(spec)}" for host, spec in order.specs.items())
        return differ(order.key, "hosts", each)
    kind, message = order.error
    error: MultiversoError = getattr(errors, kind, MultiversoError)(message)
    return error


def nobody_has(key: Key) -> MultiversoError:
    """Returns the error for a worker that asks for a synchronous table whose values no host has any more."""
    return MultiversoError(
        f"{words(key)} has an updater, and no host is left that has gone through all of its rounds: those that had its "
        "values are lost, or their workers' reads have raised in the middle of a round. Start again, from the newest "
        "checkpoint"
    )
