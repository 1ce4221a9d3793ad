"""The tables of a fabric: what a host holds of each, which host is the home of which chunk, and who lost that part.

Where a rule between hosts decides, the shared values are no host's own (``shared_values.py``), and this host's
copy pushes to them over a link to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof, c_int32

import numpy as np

from multiverso.errors import MultiversoError
from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import Every, RuleBetween
from multiverso.hosts.peer.resources import Array
from multiverso.hosts.values.copies import Changes, Copy, homes_of, rehomed
from multiverso.hosts.values.link import Link
from multiverso.hosts.values.shared_values import SharedValues
from multiverso.hosts.values.state import Held
from multiverso.kernels.between_hosts.agreeing import versions
from multiverso.layout import words as at
from multiverso.memory import words


class HeldTables:
    """All of them. Owner: the fabric, whose lock guards it.

    Args:
        host: this host's number.
        hosts: how many there are.

    Attributes:
        survivors: the hosts that were left after each loss so far.
        rest: how the thread that looks at the tables sleeps; the one thing that is used without the fabric's lock.
    """

    def __init__(self, host: int, hosts: int) -> None:
        self._host, self._hosts = host, hosts
        self.survivors: list[list[int]] = []
        self.held: dict[int, Held] = {}
        self._bases: Array = np.zeros(0, np.int64)  # the addresses of all
        self.rest = Rest()

    def add(self, number: int, copy: Copy, wire: str, every: Every | None, rule: str) -> Held:
        """Makes what a table needs, and gives its chunks homes; the other arguments are those of ``Fabric.attach``.

        Raises:
            MultiversoError: there is one of this number.
        """
        if number in self.held:
            raise MultiversoError(f"table {number} is attached already")
        # rounded, a difference goes too far, and a variance may be small beside what has the same scale
        coded = Wire.of("native" if copy.convex else wire, copy.dtype)
        ruled = RuleBetween.of(rule, copy.dtype)
        homes = homes_of(number, len(copy.chunks), list(range(self._hosts)))
        for left in self.survivors:
            homes = rehomed(homes, left)
        outer = None
        if ruled.name != "sum":
            alive = len(self.survivors[-1]) if self.survivors else self._hosts
            outer = SharedValues.of(ruled, alive, copy, number)
        held = self.held[number] = Held(copy, Changes(copy.version), homes, coded, every or Every(), outer)
        self._note_bases()
        return held

    def remove(self, number: int) -> Held:
        """Forgets a table; returns it, to be closed once no link has it."""
        held = self.held.pop(number)
        self._note_bases()
        return held

    def _note_bases(self) -> None:
        self._bases = np.array([held.copy.shard.base for held in self.held.values()], np.int64)

    @property
    def epoch(self) -> int:
        """How often homes were reassigned."""
        return len(self.survivors)

    def rehome(self, hosts: list[int], links: Mapping[int, Link]) -> None:
        """Gives what lived at lost hosts new homes.

        Args:
            hosts: those that are left.
            links: all, by host: those to lost ones, whose threads have ended, and where there is one to itself, that.
        """
        self.survivors.append(hosts)
        gone = [link for peer, link in links.items() if peer not in hosts]
        for number, held in self.held.items():
            homes = rehomed(held.homes, hosts)
            moved = [chunk for chunk, home in enumerate(held.homes) if homes[chunk] != home]
            agreed = {chunk: values for link in gone for chunk, values in link.hand_over(number).items()}
            here = [chunk for chunk in moved if homes[chunk] == self._host]
            held.homes = homes
            if held.outer is not None:
                held.outer.regroup(len(hosts), {chunk: agreed[chunk] for chunk in here})
            for peer, link in links.items():
                if peer in hosts and (peer != self._host or held.outer is not None):
                    away = {chunk: agreed[chunk] for chunk in moved if homes[chunk] == peer}
                    link.regroup(number, self.epoch, away, here)

    def look(self, resting: bool) -> bool:
        """Asks the versions of all tables at once; returns whether this host's workers have changed one.

        Args:
            resting: workers that change one from now on are to end the next sleep of ``rest``.
        """
        if resting:
            self.rest.announce()
        found, moved = np.zeros_like(self._bases), False
        if found.size:
            versions.compiled()(self._bases, found)
        for held, version in zip(self.held.values(), found.tolist(), strict=True):
            moved |= held.changes.version != version
            held.changes.version = version
        return moved

    def close(self) -> None:
        """Refuses whatever would still go into a table's memory."""
        for held in list(self.held.values()):
            held.copy.close()


_NAP_SECONDS = 0.005


class Rest:
    """A sleep that ends when a worker changes a table. One thread sleeps, any may wake it.

    The word on which it sleeps is 1 from when that is announced until another thread ends it. The sleeper looks at the
    tables after it was announced: so a worker either finds the word, or was seen.
    """

    def __init__(self) -> None:
        self._own = c_int32(0)
        self._word = addressof(self._own)

    def share(self, control: int) -> None:
        """Says where the control segment is, in which workers find the word, or 0. Until then a sleep is a nap."""
        if control:
            self._word = control + at.NODE_RESTS

    def announce(self) -> None:
        """Asks workers to end the sleep that may follow."""
        words.store32(self._word, 1)

    def sleep(self, seconds: float) -> None:
        """Sleeps for at most so long, unless it was ended since it was announced."""
        word = self._word
        words.wait_for_change(word, 1, min(seconds, _NAP_SECONDS) if word == addressof(self._own) else seconds)

    def wake(self) -> None:
        """Ends a sleep, or one that was announced."""
        words.bump_and_wake(self._word)
