"""Rows with backups on simulated hosts: every add of a host that is left counts once; a broken law is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulated import spread

from multiverso.hosts.spread.backups import Backups
from multiverso.hosts.spread.places import Places
from multiverso.hosts.spread.table import SpreadTable
from multiverso.shards.keyed_rows import KeyedRows

SCHEDULES = 25
TRIED = 200


def test_every_add_of_a_host_that_is_left_counts_once() -> None:
    faults = lost = returned = 0
    for seed in range(SCHEDULES):
        try:
            world = spread.run(seed)
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--spread --replay': {error}") from error
        faults, lost = faults + world.faults, lost + world.view - world.returned
        returned += world.returned
    assert faults > SCHEDULES
    assert lost > SCHEDULES // 3
    assert returned > SCHEDULES // 5


def test_a_seed_makes_the_same_schedule_again() -> None:
    lines: list[list[str]] = [[], []]
    for kept in lines:
        spread.run(11, kept.append)
    assert lines[0] == lines[1]


def _answers_at_once(backups: Backups, *arguments: Any) -> dict[int, int]:
    TELL(backups, *arguments)
    return {}


def _tells_nothing_by_itself(backups: Backups, always: bool, to_the_end: bool = False) -> bool:
    return True


TELL = Backups.tell


@pytest.mark.parametrize(
    ("owner", "name", "broken", "seed"),
    [
        (Backups, "has", lambda *_: False, 15),  # what was applied is applied again
        (Backups, "has", lambda *_: True, 1),  # what was not applied is not sent again
        (Backups, "tell", _answers_at_once, 56),  # an answer before the backup has it
        (Backups, "look", _tells_nothing_by_itself, 0),  # a new backup is not filled
        (SpreadTable, "is_early", lambda *_: False, 1),  # a question is answered by who is not the home yet
        (Places, "is_moved", lambda *_: False, 19),  # and by who is the home no more
        (Places, "still_kept", lambda _, home, frame: frame, 14),  # an old home's row replaces a new one's
        (KeyedRows, "are_through", lambda *_: True, 1),  # rows go while a worker adds to them
        (Backups, "has_all", lambda *_: True, 1),  # the last changes are not told
        (Backups, "drop", lambda *_: None, 1),  # what is no more kept is taken for rows later
    ],
)
def test_a_broken_law_is_noticed(
    owner: type, name: str, broken: Callable[..., Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the schedule that was the first to notice it, or in another one, once the code has changed."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, KeyError), match=r"has added|kept|^\d$"):
        for tried in (seed, *range(TRIED)):
            spread.run(tried)
