"""Where workers' words lie in a host's memory, and how a wait says for whom it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiverso.layout.words import MAX_WORKERS, MOST_WORKERS
from multiverso.layout.worker_index import WorkerIndex, bits_of, has_bit, masks_of, workers_in


def test_on_one_host_a_worker_is_where_its_number_says() -> None:
    index = WorkerIndex(5)
    assert [index.of(i) for i in range(6)] == list(range(6))
    assert (index.here, index.count, index.slots) == (5, 5, 5)


@given(st.integers(2, 300), st.data())
def test_this_hosts_workers_come_first_then_the_node_then_the_others(workers: int, data: st.DataObject) -> None:
    local = data.draw(st.sets(st.integers(0, workers - 1), min_size=1, max_size=min(workers - 1, MAX_WORKERS)))
    index = WorkerIndex(workers, tuple(sorted(local)))
    places = {i: index.of(i) for i in range(workers)}
    assert sorted(places[i] for i in local) == list(range(index.here))
    assert index.of(workers) == index.here == len(local)
    assert sorted([*places.values(), index.here]) == list(range(index.count))
    assert all(index.number_of(place) == i for i, place in places.items())
    assert index.number_of(index.count) == index.number_of(-1) == -1


@given(st.sets(st.integers(0, MOST_WORKERS - 1)))
def test_a_wait_names_those_it_is_for_who_are_near_the_first(workers: set[int]) -> None:
    mask, which = bits_of(workers)
    assert -(1 << 63) <= mask < 1 << 63
    named = {i for i in range(MOST_WORKERS) if has_bit(mask, which, i)}
    assert named == {i for i in workers if i // 64 == min(workers) // 64}


@given(st.sets(st.integers(0, 299)))
def test_masks_say_all_of_them(workers: set[int]) -> None:
    masks = masks_of(workers, 300)
    assert len(masks) == 5
    assert workers_in(masks) == workers
