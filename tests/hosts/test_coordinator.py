"""What the coordinator decides, message by message: no sockets, no clocks."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from multiverso.errors import StartupError
from multiverso.hosts.control import coordinator as decided
from multiverso.hosts.control.messages import (
    Create,
    Done,
    Gone,
    Hello,
    Line,
    Note,
    Options,
    Report,
    Settled,
    Workers,
    encoded,
    order_of,
    report_of,
)
from multiverso.hosts.options import ExchangeOptions
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.roster import Roster, spread
from multiverso.layout import words as at
from multiverso.spec.table import TableSpec

Message = dict[str, Any]


class Coordinator(decided.Coordinator):
    """As hosts have it: reports and orders are what travels."""

    def receive(self, host: int, report: Message) -> list[tuple[int, Message]]:  # type: ignore[override]
        return _plain(super().receive(host, report_of(json.dumps(report).encode())))

    def lose(self, host: int, why: str) -> list[tuple[int, Message]]:  # type: ignore[override]
        return _plain(super().lose(host, why))


def _plain(orders: list[Any]) -> list[tuple[int, Message]]:
    assert all(order_of(encoded(order)) == order for _, order in orders)
    return [(host, _named(msgspec.to_builtins(order))) for host, order in orders]


def _named(order: Message) -> Message:
    """An order to begin a step goes by the step's name."""
    order = {**order, "key": list(order["key"])} if "key" in order else order
    return {**order, "do": order["step"]} if order["do"] == "begin" else order


ROSTER = Roster(0, ("a", "b", "c"), (2, 1, 1), ("127.0.0.1", 1))
SPEC = TableSpec("array", 1, 10).as_message()
OTHER = TableSpec("array", 1, 11).as_message()


def line(worker_id: int, liveness: int = at.ALIVE, participation: int = at.ACTIVE, barrier: int = 0) -> Any:
    return msgspec.to_builtins(Line(worker_id, 1000 + worker_id, liveness, participation, barrier))


def workers(host: int, **states: int) -> Message:
    return {"do": "workers", "workers": [line(i, **states) for i in ROSTER.workers_of(host)]}


def ask(host: int, key: Any = ("order", 1), spec: Message = SPEC, **more: Any) -> Message:
    request = {"workers": list(ROSTER.workers_of(host)), "masters": [], "mode": "async", **more}
    return {"do": "create", "key": list(key), "spec": spec, **request}


def done(step: str, key: Any = ("order", 1), error: Any = None) -> Message:
    return {"do": "done", "key": list(key), "step": step, "error": error}


def begun() -> Coordinator:
    """A coordinator whose hosts' workers are all there."""
    coordinator = Coordinator(ROSTER)
    for host in range(3):
        coordinator.receive(host, {"do": "hello", "address": ["127.0.0.1", host]})
    for host in range(3):
        coordinator.receive(host, workers(host))
    coordinator.tell_news()
    return coordinator


def words(orders: list[tuple[int, Message]]) -> list[tuple[int, str]]:
    return [(host, order["do"]) for host, order in orders]


ALL = [0, 1, 2]


def test_workers_are_spread_in_host_order() -> None:
    assert spread(4, 2) == (2, 2)
    assert spread(5, 3) == (2, 2, 1)
    with pytest.raises(StartupError, match="give -n 3 or more"):
        spread(2, 3)
    assert [list(ROSTER.workers_of(host)) for host in range(3)] == [[0, 1], [2], [3]]
    assert [ROSTER.host_of(i) for i in range(4)] == [0, 0, 1, 2]
    assert ROSTER.places() == ("a", "a", "b", "c")
    assert Roster.from_text(ROSTER.on(2).as_text()) == ROSTER.on(2)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": 0}', ROSTER.as_text().replace("[2,1,1]", "[2,1]")])
def test_what_is_no_roster_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="roster"):
        Roster.from_text(text)


NONSENSE = (None, True, -1, 1.5, 2**70, "x", [], [1], [[1]], {}, {"a": 1})


def some_report(chance: random.Random) -> Message:
    """A report whose parts have the right types, and any values."""
    kind = chance.choice(get_args(Report))
    number = chance.choice((0, 1, 2, 3, 7, -1, 1 << 40))
    parts = {
        "address": ["x", number],
        "options": chance.choice(({}, {"on_lost": "continue"})),
        "workers": [line(number)] if kind is Workers else [number],
        "written": [number],
        "turns": {number: number},
        "arrived": {number: number},
        "key": chance.choice((["order", 1], ["name", "w"])),
        "spec": chance.choice((SPEC, OTHER, {})),
        "mode": "async",
        "masters": [number],
        "step": chance.choice(("make", "join", "push")),
        "error": chance.choice((None, ["MultiversoError", "no"])),
        "closing": True,
        "note": "x",
        "name": "policy",
        "instead_of": chance.choice((None, ["127.0.0.1", number])),
        "question": chance.choice(
            (
                {},
                {"about": "count", "name": "a", "amount": number},
                {"about": "finished", "deal": 1, "finished": number},
            )
        ),
        "tables": {number: {number: [number]}},
    }
    names = [part.name for part in msgspec.structs.fields(kind)]
    return {"do": kind.__name__.lower(), **{name: parts.get(name, number) for name in names}}


def test_whatever_is_a_report_is_understood_and_nonsense_is_refused() -> None:
    chance = random.Random(4)
    for _ in range(300):
        coordinator = Coordinator(ROSTER)
        for _ in range(20):
            report = some_report(chance)
            coordinator.receive(chance.randrange(3), report)
            name = chance.choice(list(report))
            with contextlib.suppress(ProtocolError):
                coordinator.receive(chance.randrange(3), {**report, name: chance.choice(NONSENSE)})


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000, b"{}", b'{"do": "x"}', b'{"do": "over", "why": 1}'])
def test_a_message_that_nobody_knows_is_an_error(body: bytes) -> None:
    """A host ignored such an order without a word."""
    for read in (report_of, order_of):
        with pytest.raises(ProtocolError, match="that is no"):
            read(body)


def test_addresses_go_round_when_all_have_said_hello() -> None:
    coordinator = Coordinator(ROSTER)
    assert coordinator.receive(1, {"do": "hello", "address": ["127.0.0.1", 1]}) == []
    assert coordinator.receive(0, {"do": "hello", "address": ["127.0.0.1", 0]}) == []
    orders = coordinator.receive(2, {"do": "hello", "address": ["127.0.0.1", 2]})
    assert words(orders) == [(host, "peers") for host in ALL]
    assert [address[1] for address in orders[0][1]["addresses"]] == ALL


def test_a_hosts_workers_are_shown_to_the_others_and_only_its_own() -> None:
    coordinator = begun()
    orders = coordinator.receive(1, {"do": "workers", "workers": [line(2), line(0, at.LOST)]})
    assert orders == [], "nobody waits for it"
    orders = _plain(coordinator.tell_news())
    assert words(orders) == [(host, "workers") for host in ALL]
    assert [told[0] for told in orders[0][1]["workers"]] == [2]


def test_what_workers_of_many_hosts_do_is_told_to_all_at_once() -> None:
    """Each host's lines went to each other one by themselves, 20 times a second: 80,000 messages between 64 hosts."""
    coordinator = begun()
    for barrier in range(1, 4):
        for host in range(3):
            for worker in ROSTER.workers_of(host):
                assert coordinator.receive(host, {"do": "workers", "workers": [line(worker, barrier=barrier)]}) == []
    orders = _plain(coordinator.tell_news())
    assert words(orders) == [(host, "workers") for host in ALL]
    assert [told[:1] + told[4:5] for told in orders[0][1]["workers"]] == [[worker, 3] for worker in range(4)]
    assert coordinator.tell_news() == []
    coordinator.receive(0, {"do": "workers", "workers": [line(0, barrier=4)]})
    orders = coordinator.receive(1, {"do": "workers", "workers": [line(2, at.LOST)]})
    assert [[told[0] for told in order["workers"]] for _, order in orders] == [[0, 2]] * 3, "a loss is told at once"
    coordinator.receive(0, {"do": "workers", "workers": [line(0, barrier=5)]})
    for host in range(3):
        orders = coordinator.receive(host, {"do": "settled", "barrier": 1})
    assert [do for _, do in words(orders)] == ["workers"] * 3 + ["take"] * 3, "what was before it is known before it"


@pytest.mark.parametrize("hosts", [4, 16, 64, 1000])
def test_the_messages_of_a_start_a_barrier_and_an_end_grow_with_the_hosts(hosts: int) -> None:
    """Each worker that came or left was told to all hosts by itself: a million messages to start 1,000 hosts."""
    roster = Roster(0, tuple(f"h{host}" for host in range(hosts)), (1,) * hosts, ("127.0.0.1", 1))
    coordinator = decided.Coordinator(roster)
    spec = msgspec.json.decode(msgspec.json.encode(SPEC))
    known: dict[int, dict[int, Line]] = {host: {} for host in range(hosts)}

    def all_say(*reports: Any) -> int:
        orders = [order for host in range(hosts) for make in reports for order in coordinator.receive(host, make(host))]
        orders += coordinator.tell_news()
        for host, order in orders:
            if isinstance(order, Workers):
                known[host] |= {told.worker_id: told for told in order.workers}
        return len(orders)

    def at_barrier(number: int, liveness: int = at.ALIVE) -> Callable[[int], Workers]:
        return lambda host: Workers([Line(host, 1000 + host, liveness, at.ACTIVE, number)])

    start = all_say(lambda host: Hello(("x", host)))
    start += all_say(at_barrier(0), lambda _: Options({}))
    start += all_say(lambda host: Create(("order", 1), spec, "async", [host], []))
    for step in ("make", "attach", "push"):
        start += all_say(lambda _, step=step: Done(("order", 1), step))
    assert start <= 15 * hosts
    assert all_say(at_barrier(1), lambda _: Settled(1)) <= 3 * hosts
    assert all_say(at_barrier(1, at.GONE), lambda _: Gone()) <= 8 * hosts
    assert coordinator.over
    assert all(len(lines) == hosts and lines[0].liveness == at.GONE for lines in known.values()), "all hear of all"


def test_what_a_process_has_done_is_told_though_newer_lines_without_it_follow() -> None:
    coordinator = begun()
    note = msgspec.to_builtins(Note("a.py", 1.0, 2, None, {}, {"order:1": {"adds": 3.0}}))
    with_note = msgspec.to_builtins(Line(0, 1000, at.ALIVE, at.ACTIVE, note=msgspec.convert(note, Note)))
    for lines in ([with_note], [line(0, barrier=1)], [line(0, barrier=2)]):
        coordinator.receive(0, {"do": "workers", "workers": lines})
    (told,) = _plain(coordinator.tell_news())[0][1]["workers"]
    assert (told[4], note in told) == (2, True)
    coordinator.receive(0, {"do": "workers", "workers": [with_note]})
    coordinator.receive(0, {"do": "workers", "workers": [[0, 2000, at.ALIVE, at.ACTIVE]]})  # another process
    (told,) = _plain(coordinator.tell_news())[0][1]["workers"]
    assert note not in told


def test_other_arguments_of_init_are_refused_where_they_come_second() -> None:
    coordinator = begun()
    for host in (2, 0):
        orders = coordinator.receive(host, {"do": "options", "options": {"on_lost": "stop"}})
        assert orders == [(host, {"do": "agreed"})]
    orders = coordinator.receive(1, {"do": "options", "options": {"on_lost": "continue"}})
    assert orders == [(1, {"do": "refuse", "options": {"on_lost": "stop"}})]


def test_a_table_by_order_goes_through_its_steps_when_all_hosts_have_done_each() -> None:
    coordinator = begun()
    assert coordinator.receive(1, ask(1)) == []
    assert coordinator.receive(0, ask(0)) == []
    orders = coordinator.receive(2, ask(2))
    assert words(orders) == [(host, "make") for host in ALL]
    assert (orders[0][1]["number"], orders[0][1]["writers"]) == (1, [0])
    for step, then in (("make", "join"), ("join", "push"), ("push", "finish")):
        assert coordinator.receive(2, done(step)) == coordinator.receive(0, done(step)) == []
        assert coordinator.receive(0, done(step)) == []  # said twice, it is done once
        assert words(coordinator.receive(1, done(step))) == [(host, then) for host in ALL]


def made(coordinator: Coordinator, key: Any = ("name", "w")) -> int:
    """Has a table made; returns its number."""
    orders = [order for host in ALL for order in coordinator.receive(host, ask(host, key))]
    number: int = orders[0][1]["number"]
    for step in ("make", "join", "push"):
        for host in ALL:
            coordinator.receive(host, done(step, key))
    return number


def of(do: str, number: int, key: Any = ("name", "w"), **more: Any) -> Message:
    return {"do": do, "key": list(key), "number": number, **more}


def test_a_closed_table_is_freed_when_all_hosts_have_parted_with_it() -> None:
    coordinator = begun()
    number = made(coordinator)
    assert coordinator.receive(0, of("unused", number, closing=True)) == []
    assert coordinator.receive(1, of("unused", number, closing=False)) == []
    assert words(coordinator.receive(1, of("used", number))) == [(1, "used")]
    assert coordinator.receive(2, of("unused", number, closing=False)) == []
    orders = coordinator.receive(1, of("unused", number, closing=False))
    assert words(orders) == [(host, "part") for host in ALL]
    assert coordinator.receive(1, of("used", number)) == []  # too late: its name is free
    assert made(coordinator) == number + 1
    assert coordinator.receive(0, of("unused", number, closing=True)) == []
    assert coordinator.receive(0, of("part", number)) == coordinator.receive(1, of("part", number)) == []
    assert words(coordinator.receive(2, of("part", number))) == [(host, "free") for host in ALL]
    assert coordinator.receive(2, of("part", number)) == []


def test_a_table_that_nobody_has_closed_stays_and_a_lost_host_is_not_waited_for() -> None:
    coordinator = begun()
    number = made(coordinator)
    assert all(not coordinator.receive(host, of("unused", number, closing=False)) for host in ALL)
    other = made(coordinator, ("order", 1))
    coordinator.receive(0, of("unused", other, ("order", 1), closing=True))
    coordinator.receive(1, of("unused", other, ("order", 1), closing=True))
    orders = coordinator.lose(2, "cut")
    assert [order["number"] for _, order in orders if order["do"] == "part"] == [other] * 2
    coordinator.receive(0, of("part", other, ("order", 1)))
    assert words(coordinator.lose(1, "cut")) == [(0, "lost"), (0, "workers"), (0, "free")]


def test_whose_initial_value_counts() -> None:
    def writers(spec: Message, masters: dict[int, list[int]]) -> list[int]:
        coordinator = begun()
        for host in ALL:
            orders = coordinator.receive(host, ask(host, spec=spec, masters=masters.get(host, [])))
        found: list[int] = orders[0][1]["writers"]
        return found

    assert writers(SPEC, {}) == [0]
    assert writers(SPEC, {2: [3], 1: [2]}) == [2]
    assert writers({**SPEC, "initial": "mean"}, {}) == [0, 1, 2, 3]


def test_by_name_the_first_host_is_enough_and_its_workers_value_counts() -> None:
    coordinator = begun()
    key = ("name", "weights")
    orders = coordinator.receive(2, ask(2, key, workers=[3]))
    assert words(orders) == [(host, "make") for host in ALL]
    assert orders[0][1]["writers"] == [3]
    assert coordinator.receive(0, ask(0, key)) == []  # it gets the same order
    for step in ("make", "join", "push"):
        for host in ALL:
            orders = coordinator.receive(host, done(step, key))
    assert words(orders) == [(host, "finish") for host in ALL]
    assert coordinator.receive(1, ask(1, key)) == []


def test_tables_that_differ_are_refused_and_the_number_stays_free() -> None:
    coordinator = begun()
    coordinator.receive(0, ask(0))
    coordinator.receive(1, ask(1, spec=OTHER))
    orders = coordinator.receive(2, ask(2))
    assert words(orders) == [(host, "drop") for host in ALL]
    assert set(orders[0][1]["specs"]) == {"a", "b", "c"}
    for host in ALL:
        orders = coordinator.receive(host, ask(host))
    assert orders[0][1]["number"] == 1


def test_a_host_without_room_ends_a_table_everywhere() -> None:
    coordinator = begun()
    for host in ALL:
        coordinator.receive(host, ask(host))
    orders = coordinator.receive(1, done("make", error=["OutOfMemoryError", "b: no room"]))
    assert words(orders) == [(host, "drop") for host in ALL]
    assert coordinator.receive(0, done("make")) == []


def test_a_host_that_withdraws_is_waited_for_again() -> None:
    coordinator = begun()
    coordinator.receive(0, ask(0))
    coordinator.receive(0, {"do": "withdraw", "key": ["order", 1]})
    coordinator.receive(1, ask(1))
    assert coordinator.receive(2, ask(2)) == []
    assert words(coordinator.receive(0, ask(0))) == [(host, "make") for host in ALL]


def test_nobody_waits_for_a_host_whose_workers_have_left() -> None:
    coordinator = begun()
    coordinator.receive(0, ask(0))
    coordinator.receive(1, ask(1))
    orders = coordinator.receive(2, workers(2, liveness=at.GONE, participation=at.LEFT))
    assert (2, "make") in words(orders)  # its copy is needed all the same


def test_a_barrier_ends_when_all_hosts_have_settled() -> None:
    coordinator = begun()
    assert coordinator.receive(0, {"do": "settled", "barrier": 1}) == []
    assert coordinator.receive(2, {"do": "settled", "barrier": 1}) == []
    orders = coordinator.receive(1, {"do": "settled", "barrier": 1})
    assert orders == [(host, {"do": "take", "barrier": 1, "written": {}, "expected": {}}) for host in ALL]
    for host in (2, 1, 0):  # of what was set on several hosts, the first one's counts; once
        orders = coordinator.receive(host, {"do": "settled", "barrier": 2, "written": [7][: host > 0], "turns": {7: 4}})
    taken = {"do": "take", "barrier": 2, "written": {7: (1, 4, True)}, "expected": {}}
    assert orders == [(host, taken) for host in ALL]
    for host in (2, 1, 0):  # a round's values come to those whose workers were not in it, too
        arrived = {7: 4 + (host == 1), 8: 3, 9: 1}
        orders = coordinator.receive(host, {"do": "settled", "barrier": 3, "arrived": arrived})
    assert orders == [(host, {"do": "take", "barrier": 3, "written": {}, "expected": {7: 5}}) for host in ALL]
    assert coordinator.receive(1, {"do": "settled", "barrier": 4}) == []


def test_a_host_that_is_done_is_not_waited_for_and_the_last_ends_the_job() -> None:
    coordinator = begun()
    coordinator.receive(0, {"do": "settled", "barrier": 1})
    coordinator.receive(1, {"do": "settled", "barrier": 1})
    assert (0, "take") in words(coordinator.receive(2, {"do": "gone"}))
    assert coordinator.receive(0, {"do": "gone"}) == []
    assert words(coordinator.receive(1, {"do": "gone"})) == [(host, "over") for host in ALL]
    assert coordinator.over


OPTIONS: Message = {
    "consistency": {"mode": "async", "staleness": 0},
    "on_lost": "continue",
    "exchange": ExchangeOptions().as_message(),
}


def test_a_host_that_was_lost_and_is_there_again_waits_for_those_that_have_never_come() -> None:
    """It is told where the others are, and one of them nobody knows yet."""
    coordinator = Coordinator(ROSTER)
    for host in (0, 1):
        coordinator.receive(host, {"do": "hello", "address": ["127.0.0.1", host]})
        coordinator.receive(host, {"do": "options", "options": OPTIONS})
    coordinator.lose(1, "it went")
    again = {"do": "hello", "address": ["127.0.0.1", 11]}
    assert coordinator.receive(1, again) == []
    orders = coordinator.receive(2, {"do": "hello", "address": ["127.0.0.1", 2]})
    assert words(orders) == [(0, "peers"), (2, "peers"), (0, "joined"), (2, "joined"), (1, "welcome")]
    assert [port for _, port in orders[-1][1]["addresses"]] == [0, 11, 2]


def test_who_comes_in_a_dead_ones_place_between_a_barrier_and_what_is_told_after_it_is_not_waited_for() -> None:
    coordinator = begun()
    coordinator.receive(1, workers(1, liveness=at.LOST))
    settled = {"do": "settled", "barrier": 1}
    for host in ALL:
        coordinator.receive(host, settled)

    def all_gather(worker: int, number: int) -> list[tuple[int, str]]:
        note = {"do": "allgather", "number": number, "worker": worker, "note": "+"}
        return words(coordinator.receive(ROSTER.host_of(worker), note))

    assert all_gather(0, 1) == all_gather(1, 1) == []
    coordinator.receive(1, workers(1))
    assert all_gather(3, 1) == [(host, "allgathered") for host in ALL], "it has passed the barrier, and sends no note"
    assert all_gather(0, 2) == all_gather(1, 2) == all_gather(3, 2) == []
    assert all_gather(2, 2) == [(host, "allgathered") for host in ALL], "the next time it does"
    assert all_gather(0, 3) == all_gather(1, 3) == all_gather(3, 3) == []
    past = line(2, barrier=4)
    orders = coordinator.receive(1, {"do": "workers", "workers": [past]})
    gathered = [(host, "allgathered") for host in ALL]
    assert words(orders)[-3:] == gathered, "it counts as past what the others do together, and will send none"


def test_who_goes_on_to_the_next_barrier_without_a_word_is_not_waited_for_and_the_others_are_told_so() -> None:
    """It was interrupted where it was to send a note, and never comes back there."""
    coordinator = begun()
    notes = [{"do": "allgather", "number": 1, "worker": worker, "note": "+"} for worker in range(4)]
    for worker in (0, 1, 3):
        assert coordinator.receive(ROSTER.host_of(worker), notes[worker]) == []
    gone_on = line(2, barrier=2)
    orders = coordinator.receive(1, {"do": "workers", "workers": [gone_on]})
    gathered = [(host, order["notes"]) for host, order in orders if order["do"] == "allgathered"]
    assert gathered == [(host, {0: "+", 1: "+", 2: None, 3: "+"}) for host in ALL]


def test_a_lost_host_is_told_of_with_its_workers_and_nobody_waits_for_it() -> None:
    coordinator = begun()
    coordinator.receive(0, ask(0))
    coordinator.receive(2, ask(2))
    coordinator.receive(0, {"do": "settled", "barrier": 1})
    coordinator.receive(2, {"do": "settled", "barrier": 1})
    orders = coordinator.lose(1, "the connection broke")
    assert words(orders)[:4] == [(0, "lost"), (2, "lost"), (0, "workers"), (2, "workers")]
    assert orders[2][1]["workers"][0][:3] == [2, 1002, at.LOST]
    assert {(0, "make"), (2, "make"), (0, "take"), (2, "take")} <= set(words(orders))
    assert coordinator.lose(1, "again") == coordinator.receive(1, {"do": "gone"}) == []


def test_a_workers_line_is_checked() -> None:
    sent = Workers([Line(0, 1000, at.ALIVE, at.ACTIVE)])
    assert report_of(encoded(sent)) == sent
    for bad in ([[]], [[0, "x"]], [[0, True]], [[0] * 6 + [[]] * 9], [1]):
        with pytest.raises(ProtocolError):
            report_of(json.dumps({"do": "workers", "workers": bad}).encode())


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_arrival_gives_every_host_the_same_tables_and_barriers(seed: int) -> None:
    """Hosts that answer late and in any order, a hundred tables and barriers: all see the same, in the same order."""
    rng = random.Random(seed)
    coordinator = begun()
    scripts: list[list[Message]] = []
    for host in ALL:
        script: list[Message] = []
        for n in range(1, 11):
            script += [ask(host, ("order", n)), {"do": "settled", "barrier": n}]
        scripts.append([*script, {"do": "gone"}])
    seen: list[list[tuple[Any, ...]]] = [[] for _ in ALL]
    answers: list[list[Message]] = [[] for _ in ALL]
    blocked: list[Any] = [None for _ in ALL]
    while any(scripts) or any(answers):
        host = rng.choice([h for h in ALL if answers[h] or (scripts[h] and blocked[h] is None)])
        if answers[host] and (blocked[host] is not None or rng.random() < 0.5):
            report = answers[host].pop(0)
        else:
            report = scripts[host].pop(0)
            blocked[host] = report.get("key") or report.get("barrier")
        for to, order in coordinator.receive(host, report):
            seen[to].append((order["do"], str(order.get("key") or order.get("barrier")), order.get("number")))
            if order["do"] in ("make", "join", "push"):
                answers[to].append(done(order["do"], order["key"]))
            elif blocked[to] in (order.get("key"), order.get("barrier")) and order["do"] in ("finish", "take"):
                blocked[to] = None
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1][0] == "over"
    assert [number for do, _, number in seen[0] if do == "make"] == list(range(1, 11))


def test_a_host_gathers_what_the_others_have_not_sent_and_waits_for_no_lost_one() -> None:
    coordinator = begun()
    orders = coordinator.receive(1, {"do": "gather", "number": 7})
    assert orders == [(host, {"do": "bring", "host": 1, "number": 7}) for host in ALL]
    assert coordinator.receive(0, {"do": "bring", "host": 1, "number": 7}) == []
    assert coordinator.receive(0, {"do": "bring", "host": 1, "number": 8}) == []
    assert coordinator.receive(1, {"do": "bring", "host": 1, "number": 7}) == []
    assert (1, {"do": "gather", "number": 7}) in coordinator.lose(2, "it was killed")
    assert coordinator.receive(2, {"do": "bring", "host": 1, "number": 7}) == []
    coordinator.receive(0, {"do": "gather", "number": 9})
    coordinator.receive(1, {"do": "bring", "host": 0, "number": 9})
    coordinator.receive(0, {"do": "gone"})  # it has nothing to bring any more, and nobody there waits
    assert coordinator._gatherings == {}
