"""What a job costs each of its hosts grows with what the host does, and not with how many there are."""

from __future__ import annotations

from simulated.scale import control, rows


def test_a_host_has_as_many_messages_with_the_coordinator_in_any_job() -> None:
    few, many = control(8), control(64)
    for what in ("to begin", "a barrier", "at the end"):
        each = f"messages of a host, {what}"
        assert many[each] <= few[each] + 2, each


def test_a_step_has_a_few_questions_to_each_home() -> None:
    found = rows(5)
    assert found["messages a step"] <= 2 * 3 * 4
    assert found["busiest home, of the mean"] < 1.1
    assert 0 < found["misses"] < 1
