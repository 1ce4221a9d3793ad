"""The rows of a table that live on this host, as other hosts ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from multiverso.errors import MultiversoError, OutOfMemoryError
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.spread.backups import Backups
from multiverso.hosts.spread.frames import ANSWER, FAILED, NO_BYTES, NO_KEYS, NUMBER_BITS, WITH_VALUES, Frame
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, KeyedRows, Keys

CHANGING = (desk.REMOVE, desk.OVERWRITE)


@dataclass(eq=False)
class Home:
    """One thread at a time may call.

    Attributes:
        table: its number.
        spec: what hosts have to mean alike by it, as a hash.
        own: the rows.
        updater: address of the table's updater.
        after: how many adds a key needs to get a row.
        backups: who else has the rows; None: nobody.
    """

    table: int
    spec: int
    own: KeyedRows
    updater: int
    after: int
    backups: Backups | None

    def add(self, keys: Keys, deltas: Bytes) -> None:
        """Gives rows that live here to the updater with what they are added."""
        self.own.apply(self.updater, self.own.enter(keys, self.after), deltas)

    def has(self, sender: int, argument: int) -> bool:
        """Whether what a push comes with that is sent again, here or at a lost host, has been added here."""
        lost, number = divmod(argument, 1 << NUMBER_BITS)
        return self.backups is not None and self.backups.has(lost, sender, number)

    def serve(self, host: int, question: Frame) -> Frame | None:
        """Returns the answer to another host's question; None: it waits until backups have what that has changed."""
        if question.kind == desk.BACK_UP:
            self._check(question)
            return self.backups.keep(host, question) if self.backups is not None else question.refusal(desk.REFUSED)
        answer = self.answer(host, question)
        changes = question.kind in CHANGING
        if self.backups is None or answer.kind & FAILED or not (question.pushed.size or changes):
            return answer
        keys = np.concatenate([question.pushed, question.keys if changes else NO_KEYS])
        waits = self.backups.tell(keys, host, question.number)
        if waits:
            self.backups.hold(host, answer, waits)
        return None if waits else answer

    def answer(self, host: int, question: Frame) -> Frame:
        """Returns the answer as it is at once."""
        try:
            return self._serve(host, question)
        except OutOfMemoryError:
            return question.refusal(desk.HOST_FULL)
        except ProtocolError:
            raise
        except MultiversoError:
            return question.refusal(desk.REFUSED)

    def _serve(self, host: int, question: Frame) -> Frame:
        kind, own = question.kind, self.own
        self._check(question)
        if kind == desk.FETCH and question.argument != self.spec:
            return question.refusal(desk.OTHER_TABLE)
        if question.pushed.size and not (kind == desk.PUSH_AGAIN and self.has(host, question.argument)):
            self.add(question.pushed, question.deltas)
        rows, keys, number = NO_BYTES, NO_KEYS, 0
        if kind == desk.REMOVE:
            keys = own.remove(question.keys)
        elif kind == desk.CONTAINS:
            keys = own.has(question.keys).astype(np.int64)
        elif kind == desk.COUNT_KEYS:
            number = own.count()
        elif kind == desk.SET_WORD:
            own.set_word(*question.keys.tolist())
        elif kind == desk.LIST:
            number, keys = own.list_keys(question.argument)
        elif kind == desk.READ:
            keys, rows = own.read_whole(question.keys)
        elif kind == desk.OVERWRITE:
            own.overwrite(question.keys, question.rows)
        elif kind not in (desk.FETCH, desk.PUSH_AGAIN):
            return question.refusal(desk.REFUSED)
        if kind in WITH_VALUES:
            rows = own.values(np.concatenate([question.pushed, question.keys]))
        return Frame(kind | ANSWER, self.table, question.number, number, keys=keys, rows=rows)

    def _check(self, question: Frame) -> None:
        count, shape = question.keys.size, question.rows.shape
        if question.kind == desk.PUSH_AGAIN and self.backups is None:
            raise ProtocolError("a push to a host that is lost, of a table whose rows have no backups")
        known = shape[0] <= count and (not shape[0] or shape[1] == self.own.whole)
        right = {desk.SET_WORD: count == 2, desk.OVERWRITE: shape == (count, self.own.whole), desk.BACK_UP: known}
        if not right.get(question.kind, True):
            raise ProtocolError(f"a question of kind {question.kind} about {count} keys")
