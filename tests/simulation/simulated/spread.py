"""Keyed tables with backups on simulated hosts: every add of a host that is left counts once, whoever is lost.

The real table, copies and backups of `hosts.spread` on real memory, over real streams; a worker on each host that adds
to random keys, each to a column of its own, and always reads what it has added. A lost host may come again, and takes
back what lived on it, while another one, or the same, is lost; or two are away at once. Some keys only one worker adds
to, and removes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from multiverso.compiling.on_demand import compile_update
from multiverso.hosts.peer.messages import Stream
from multiverso.hosts.peer.resources import Buffers
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import Frame, head_of
from multiverso.hosts.spread.placement import groups_of
from multiverso.hosts.spread.table import SpreadTable
from multiverso.layout import desk, keyed, words
from multiverso.memory.words import store32, store64
from multiverso.shards.keyed_rows import KeyedRows
from multiverso.spec.states import State
from multiverso.tables.keyed.memory import write_empty
from multiverso.tables.keyed.spec import KeyedSpec
from multiverso.updaters import resolve
from multiverso.updaters.cached import copy_loops
from simulated.world import Host, Memory, Scene, World, random_scene

HOSTS = 4  # at most
COLUMNS = HOSTS + 2  # those of hosts that come again behind the others
TABLE, SPEC = 7, 77
ADD = resolve("add")


class Piece:
    """Plain memory, as `KeyedRows` takes it."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size + words.PAGE, np.uint8)
        self.begin = -self._bytes.ctypes.data % words.PAGE
        self.address = self._bytes.ctypes.data + self.begin

    def array(self, offset: int, count: int, dtype: Any) -> Any:
        return np.frombuffer(self._bytes.data, dtype, count, self.begin + offset)


class Hand:
    """A control segment as one process has it: the node's, or the only worker's."""

    def __init__(self, is_node: bool) -> None:
        self.piece = Piece(words.control_bytes(1))
        store32(self.piece.address + words.NODE_BLOCK, int(is_node))
        for worker in range(2):
            block = self.piece.address + words.worker_block(worker)
            store64(block + words.ATTACHMENT, 1)
            store32(block + words.LIVENESS, words.ALIVE)

    def rows(self, memory: Piece) -> KeyedRows:
        return KeyedRows(memory, self.piece.address, lambda: False)  # type: ignore[arg-type]


NODE, WORKER = Hand(True), Hand(False)


def table_memory(*states: State, columns: int = COLUMNS, dtype: str = "int64", rows: int = 300) -> Piece:
    spec = replace(KeyedSpec.of(columns, dtype, 0, 0, ADD, None), states=states)
    places = keyed.places(spec.row_bytes, rows)
    piece = Piece(places["size"])
    write_empty(piece.address, spec, places)
    return piece


@dataclass(eq=False)
class Site:
    """A host's node and its worker."""

    host: int
    column: int
    table: SpreadTable
    own: KeyedRows  # in the worker's hand, as is the next
    copies: KeyedRows
    homes: list[np.ndarray]
    later: list[tuple[int, bytes]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)  # of those: what comes is of who comes again
    added: dict[int, int] = field(default_factory=dict)
    calls: int = 0  # left
    is_busy: bool = False
    is_settled: bool = False
    private: set[int] = field(default_factory=set)  # keys that it has added to, and not removed
    orders: deque[Callable[[], None]] = field(default_factory=deque)  # of the coordinator's


class SpreadWorld(World):
    """Hosts with a table between them.

    Args:
        scene: what happens.
        random: decides when and where.
        trace: gets a line for each thing that happens.
    """

    def __init__(self, scene: Scene, random: Random, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(replace(scene, elements=(), dtypes=(), joins=False, star=False), random, Memory(), trace)
        self.keys = np.array(random.sample(range(10_000), random.choice((3, 30, 100))), np.int64)
        self.most = random.choice((4, 20, 1000))
        self.pool = Buffers(4)
        self.phase = 0
        self.comes_again = random.choice((False, True, True))
        self.crashes_left = random.choice((0, 1, 1))  # beside a return, or before it
        self.two_apart = random.random() < 0.4
        # what the coordinator knows
        self.view, self.apart = 0, set[int]()
        self.filled: dict[int, set[int]] = {}
        self.returned = 0
        for host in self.hosts:
            host.neighbours = {peer: self._stream(host, peer) for peer in host.links}
        self.sites = [self._site(host, host.number) for host in self.hosts]
        self.past: list[Site] = []  # of hosts that were lost and have come again
        for host in self.hosts:
            self._later(0.002, self._look_at_rows, host)

    def _stream(self, host: Host, peer: int) -> Stream:
        return Stream(functools.partial(self._arrived, host, peer), self.pool)

    def _site(self, host: Host, column: int, apart: Collection[int] = ()) -> Site:
        own, copied, kept = table_memory(), table_memory(State("unsent")), table_memory()
        loops = copy_loops("add")
        take, land = (compile_update(loop, "int64") for loop in (loops.take, loops.land))
        now: Callable[[], float] = lambda: self.clock.now + 1.0  # noqa: E731
        homes: list[np.ndarray] = []
        copies = Copies(NODE.rows(copied), take, land, self.most, 0.2, now)
        table = SpreadTable(
            TABLE,
            SPEC,
            host.number,
            len(self.hosts),
            NODE.rows(own),
            copies,
            compile_update(ADD.apply, "int64"),
            1,
            functools.partial(self._put, host),
            homes.append,
            NODE.rows(kept),
            apart,
            [other for other in apart if self.hosts[other].dead and other != host.number],
            self.view,
            now=now,
        )
        return Site(host.number, column, table, WORKER.rows(own), WORKER.rows(copied), homes)

    def _put(self, host: Host, peer: int, *parts: Any) -> None:
        stream = host.neighbours[peer]
        assert isinstance(stream, Stream)
        stream.put(b"".join(parts))
        self.clock.after(0, lambda: self._poke(host, peer))

    # -- nodes -------------------------------------------------------------------------------------------------

    def _arrived(self, host: Host, peer: int, message: memoryview) -> None:
        self._receive(host, peer, bytes(message))

    def _receive(self, host: Host, peer: int, message: bytes) -> None:
        site = self.sites[host.number]
        if peer in site.lost:
            if peer in site.ended:
                site.later.append((peer, message))
            return
        if self.trace is not None:
            self.say(f"{host.number} hears of {peer}: {head_of(message)}")
        frame = Frame.of(memoryview(bytearray(message)), site.table.own.size)
        if site.table.is_early(frame):
            site.later.append((peer, message))
        elif not frame.is_question:
            site.table.answered(peer, frame)
        elif (answer := site.table.serve(peer, frame)) is not None:
            self._put(host, peer, *answer.parts())

    def _look_at_rows(self, host: Host) -> None:
        """The node's turn."""
        if not self._when_up(host, lambda: self._look_at_rows(host)):
            return
        site = self.sites[host.number]
        if self.phase == 2 and not site.is_settled:
            site.is_settled = site.table.leave_all()
        elif self.phase == 1:
            site.is_settled = not site.table.look(True, True) or site.is_settled
        else:
            site.table.look(self.random.random() < 0.1)
        for other in site.table.filled:
            self._note_filled(host, other, site.table.places.view)
        self._receive_later(host)
        self._later(0.004, self._look_at_rows, host)

    # -- what the coordinator says, to each host in this order ---------------------------------------------------

    def _order(self, host: Host, do: Callable[..., None], *arguments: Any) -> None:
        self.sites[host.number].orders.append(functools.partial(do, host, *arguments))
        self._later(0.05, self._obey, host, self.sites[host.number])

    def _obey(self, host: Host, site: Site) -> None:
        if self._when_up(host, lambda: self._obey(host, site)) and site is self.sites[host.number]:
            site.orders.popleft()()
            self._receive_later(host)

    def _crash(self, dead: Host) -> None:
        self.view += 1
        self.apart.add(dead.number)
        self.filled.clear()
        super()._crash(dead)

    def _tell_loss(self, host: Host, dead: Host) -> None:
        self._order(host, self._regroup, dead)

    def _regroup(self, host: Host, dead: Host) -> None:
        super()._regroup(host, dead)
        site = self.sites[host.number]
        site.lost.add(dead.number)
        site.table.lost(dead.number)
        site.ended.add(dead.number)
        host.neighbours[dead.number] = self._stream(host, dead.number)
        if self.regrouping == 0 and self.comes_again:
            self._later(0.05, self._come_again, dead)

    def _note_filled(self, host: Host, other: int, view: int) -> None:
        if view != self.view or host.dead or other not in self.apart or self.hosts[other].dead:
            return
        filled = self.filled.setdefault(other, set())
        filled.add(host.number)
        if filled.issuperset(one.number for one in self.live):
            self.say(f"host {other} returns")
            self.filled.clear()
            self.apart.discard(other)
            self.view += 1
            self.moves += 1
            self.returned += 1
            for one in self.live:
                self._order(one, self._let_return, other)
            if self.crashes_left and not self.two_apart:
                self.crashes_left -= 1
                self._later(self.random.choice((0.005, 0.05, 0.2)), self._crash, self.random.choice(self.live))

    def _let_return(self, host: Host, other: int) -> None:
        self.say(f"host {host.number} hears that {other} has returned")
        self.sites[host.number].table.returned(other)

    def _receive_later(self, host: Host) -> None:
        site = self.sites[host.number]
        later, site.later = site.later, []
        for peer, message in later:
            self._receive(host, peer, message)

    def _come_again(self, host: Host) -> None:
        """Another node takes a lost host's place: it has no rows, and is no home at first."""
        self.say(f"host {host.number} comes again")
        for key in [key for key in self.history if host.number in key]:
            del self.history[key]  # on connections of the old node, which are closed for good
        host.dead, host.incarnation, host.stalled_until = False, host.incarnation + 1, 0.0
        host.links.clear()
        self.past.append(self.sites[host.number])
        for other in self.live:
            if other is not host:
                host.neighbours[other.number] = self._stream(host, other.number)
        self.sites[host.number] = self._site(host, HOSTS + self.joined, set(self.apart))
        self.moves += 1
        self.joined += 1
        for other in self.live:
            if other is not host:
                self._expect_again(host, other)
                self._later(0.02, self._connect, *sorted((host.number, other.number)))
                self._order(other, self._let_in, host)
        self._later(0.002, self._look_at_rows, host)
        self._give_calls(host)
        if self.two_apart and self.crashes_left:
            self.crashes_left -= 1
            self._later(0.1, self._crash_beside, 100)

    def _crash_beside(self, times: int) -> None:
        """Another home is lost, as soon as each row is on two hosts again."""
        homes = [self.sites[host.number] for host in self.live if host.number not in self.apart]
        tables = [site.table for site in homes if site.table.backups is not None]
        is_whole = all(
            table.places.view == self.view
            and not table.places.arriving.any()
            and not table.backups._unfilled.any()  # type: ignore[union-attr]
            and not table.backups._is_behind(1)  # type: ignore[union-attr]
            for table in tables
        )
        if len(homes) > 1 and self.regrouping == 0 and is_whole:
            self._crash(self.hosts[self.random.choice(homes).host])
        elif times:
            self._later(0.01, self._crash_beside, times - 1)

    def _let_in(self, host: Host, new: Host) -> None:
        site = self.sites[host.number]
        site.lost.discard(new.number)
        site.ended.discard(new.number)
        site.table.joined(new.number)

    # -- workers -----------------------------------------------------------------------------------------------

    def _work(self, host: Host, site: Site) -> None:
        """A call: adds to some keys, or reads them."""
        if not self._when_up(host, lambda: self._work(host, site)) or site is not self.sites[host.number]:
            return
        if site.is_busy:
            self._later(0.005, self._work, host, site)
            return
        site.is_busy = True
        if self.random.random() < 0.3:
            key = 10_000 + 10 * site.column + self.random.randrange(3)
            do = self.random.choice((0, 1, desk.REMOVE, desk.CONTAINS))
            if do < desk.REMOVE:
                self._call(host, site, np.array([key]), do)
            else:
                self._ask_of_own(host, site, key, do)
            return
        many = self.random.randint(1, min(self.most, 8, self.keys.size))
        keys = np.array(sorted(self.random.sample(self.keys.tolist(), many)))
        self._call(host, site, keys, self.random.choice((0, 1, 2, 3)))

    def _call(self, host: Host, site: Site, keys: np.ndarray, add: int) -> None:
        """Does it, or fetches what is missing first."""
        here = site.homes[-1][groups_of(keys)] == host.number
        there = keys[~here]
        places = site.copies.find(there)
        if (places < 0).any():
            site.copies.release()
            missing = there[places < 0]

            def done(code: int, result: int, answer: Frame | None) -> None:
                assert code == desk.DONE_WELL, f"host {host.number} was refused rows: {code} {result}"
                self._later(0.001, self._go_on, host, site, keys, add)

            site.table.ask(desk.FETCH, missing, done)
            return
        if add:
            own = site.own.enter(keys[here])
            slow = self.random.random() < 0.2
            self._later(0.05 if slow else 0.0, self._add, host, site, keys, here, own, places, add)
            return
        site.copies.release()
        rows = np.empty((keys.size, COLUMNS), np.int64)
        rows[here] = site.own.values(keys[here]).view(np.int64)
        rows[~here] = site.copies.values(there).view(np.int64)
        mine = [site.added.get(key, 0) for key in keys.tolist()]
        found = rows[:, site.column].tolist()
        assert found == mine, f"host {host.number} reads {found} of {keys} where it has added {mine}"
        site.is_busy = False
        site.calls -= 1

    def _ask_of_own(self, host: Host, site: Site, key: int, kind: int) -> None:
        """Removes a key that only this worker adds to, or asks whether there is one."""
        keys, flags, losses = np.array([key]), [0], self.view - self.returned

        def took(answer: Frame, places: np.ndarray) -> None:
            flags[:] = answer.keys.tolist() or flags

        def done(code: int, result: int, answer: Frame | None) -> None:
            assert code == desk.DONE_WELL, f"host {host.number} was refused an answer: {code} {result}"
            if losses == self.view - self.returned:  # else a host may have removed it, and been lost before it said so
                assert bool(flags[0]) == (key in site.private), f"host {host.number} has added {key}: {site.private}"
            if kind == desk.REMOVE:
                site.private.discard(key)
                site.added[key] = 0
            site.is_busy = False
            site.calls -= 1

        if site.homes[-1][groups_of(keys)][0] == host.number:
            found = site.own.remove(keys) if kind == desk.REMOVE else site.own.has(keys)
            flags[0] = int(found[0])
            done(desk.DONE_WELL, 0, None)
        else:
            site.table.ask(kind, keys, done, took)

    def _add(self, host: Host, site: Site, keys: Any, here: Any, mine: Any, copied: Any, add: int) -> None:
        """Does an add to rows that it has found, whatever has moved meanwhile: they are pinned."""
        if not self._when_up(host, lambda: self._add(host, site, keys, here, mine, copied, add)):
            return
        if site is not self.sites[host.number]:
            return
        delta = np.zeros((keys.size, COLUMNS), np.int64)
        delta[:, site.column] = add
        site.own.apply(compile_update(ADD.apply, "int64"), mine, delta[here])
        site.copies.apply(compile_update(copy_loops("add").add, "int64"), copied, delta[~here])
        for key in keys.tolist():
            site.added[key] = site.added.get(key, 0) + add
            if key >= 10_000:
                site.private.add(key)
        site.is_busy = False
        site.calls -= 1

    def _go_on(self, host: Host, site: Site, keys: np.ndarray, add: int) -> None:
        if self._when_up(host, lambda: self._go_on(host, site, keys, add)) and site is self.sites[host.number]:
            self._call(host, site, keys, add)

    # -- a whole schedule ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Lets the workers work beside all faults, then brings everything home, and looks at all rows."""
        for host in self.hosts:
            self._give_calls(host)
        self.schedule_faults()
        self._until(self._have_called, "the calls")
        self.phase = 1
        while self.phase < 3:
            self._until(lambda: self.regrouping == 0, "the loss of a host")
            self._until(self._have_called, "the calls of one that has come again")
            self._until(self._have_returned, "the return of one that has come again")
            moves = self.moves
            for site in self.sites:
                site.is_settled = False
            self._until(
                lambda: self.moves != moves or all(self.sites[host.number].is_settled for host in self.live),  # noqa: B023
                f"step {self.phase} of a barrier",
            )
            self.phase = self.phase + 1 if self.moves == moves else 1
        for key in self.keys:
            self._check(key)
        for host in self.live:
            site = self.sites[host.number]
            for key in range(10_000 + 10 * site.column, 10_000 + 10 * site.column + 3):
                self._check(key)
                has = [self.sites[one.number].table.own.has(np.array([key]))[0] for one in self.live]
                assert sum(has) == (key in site.private), f"host {host.number} has added {key} again: {site.private}"

    def _have_returned(self) -> bool:
        places = [self.sites[host.number].table.places for host in self.live]
        return not any(host.number in self.apart for host in self.live) and not any(
            place.is_moving or place.view != self.view for place in places
        )

    def _have_called(self) -> bool:
        return all(self.sites[host.number].calls <= 0 for host in self.live)

    def _give_calls(self, host: Host) -> None:
        site = self.sites[host.number]
        site.calls = 3 * self.scene.adds
        for _ in range(3 * self.scene.adds):
            self._later(self.scene.seconds, self._work, host, site)

    def _check(self, key: int) -> None:
        one = np.array([key])
        homes = {int(self.sites[host.number].table.places.homes[groups_of(one)][0]) for host in self.live}
        assert len(homes) == 1, f"{key} lives on {homes}"
        site = self.sites[homes.pop()]
        row = site.table.own.values(one).view(np.int64)[0]
        for other in (*self.sites, *self.past):
            added, found = other.added.get(int(key), 0), row[other.column]
            is_lost = other in self.past or self.hosts[other.host].dead
            right = 0 <= found <= added if is_lost else found == added
            assert right, f"{key}: a host has added {added} in column {other.column}, {row} are there"
        kept = [self.sites[host.number].table.kept for host in self.live]
        backups = [one_kept.values(one).view(np.int64)[0] for one_kept in kept if one_kept and one_kept.has(one).any()]
        homes_left = len(self.hosts) - len(self.apart)
        wanted = [row.tolist()] if homes_left > 1 else []
        found = [backup.tolist() for backup in backups]
        # a row may have been entered, and no add come to it
        assert found == wanted or (not row.any() and not found), f"{key}: {row}, kept {backups}"


def run(seed: int, trace: Callable[[str], None] | None = None) -> SpreadWorld:
    """Runs the schedule of a seed; an AssertionError says what is wrong with it."""
    random = Random(seed)
    scene = replace(random_scene(random), crashes=random.choice((0, 1, 1)))
    if trace is not None:
        trace(str(scene))
    world = SpreadWorld(scene, random, trace)
    world.run()
    return world
