"""Versions in slots: what is pinned is whole and stays, whoever dies, and a slot that nobody has pinned is free."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from interleavings.source import Source
from interleavings.world import DRAWN, How, World, schedule_of

_NUMBERS = 2  # of a version: all of them are its number
_PINS = 2  # of a reader


def publications(source: Source, seed: int, how: How = DRAWN) -> int:
    """Worker 0 publishes, the others read, each with up to two versions at a time."""
    random = Random(seed)
    readers, slots, number = random.choice((1, 2, 2, 3)), random.choice((2, 2, 3)), random.choice((2, 3, 4, 6))
    reach = 20 * (readers + 1) * number
    world = World(source, schedule_of(random, seed, reach, how, readers + 1), readers + 1, continues=True)
    kernels, at, memory = source["kernels.publications"], source["layout.publications"], source.memory
    for worker in range(readers + 1):
        world.begin(worker)
    memory.torn = random.random() < 0.7
    current = memory.take(64)
    lines, data = memory.take(readers * at.READER_BYTES), memory.take(slots * 8 * _NUMBERS)
    published, left_out = [0], 0

    def slot_of(word: int) -> np.ndarray:
        return memory.array(data + ((word & at.SLOT_MASK) - 1) * 8 * _NUMBERS, _NUMBERS, np.int64)

    def pins(reader: int) -> list[int]:
        return [lines + (reader - 1) * at.READER_BYTES + at.PINS + 8 * place for place in range(_PINS)]

    def take_back() -> bool:
        """What the publisher does when every slot is taken: it looks for readers that are dead."""
        dead = [reader for reader in world.dead if reader and any(memory.array(pins(reader)[0], _PINS, np.int64))]
        for reader in dead:
            memory.array(pins(reader)[0], _PINS, np.int64)[:] = 0
        return bool(dead)

    def publish(_: int) -> None:
        nonlocal left_out
        for version in range(1, number + 1):
            while (slot := kernels.free_slot(current, lines, readers, slots)) < 0 and world.quietly(take_back):
                pass
            if slot < 0:
                assert len(published) > 1, "left out where nothing can have been pinned"
                left_out += 1
                continue
            word = version << at.SLOT_BITS | (slot + 1)
            memory.write(slot_of(word), np.full(_NUMBERS, version))
            published.append(version)  # it may be read from the next step on
            kernels.make_current(current, word)

    def read(reader: int) -> None:
        kept: list[tuple[Any, int]] = []
        seen = 0
        for _ in range(number):
            cell = np.zeros(1, np.int64)
            before = memory.array(current, 1, np.int64)[0]
            word = kernels.pin(current, pins(reader)[0], cell)
            assert word >= 0, "no pin is free, and not all are taken"
            if word == 0:
                assert not before, "nothing, after something was published"
                kernels.unpin(cell, None)
                continue
            version = word >> at.SLOT_BITS
            assert seen <= version, f"reader {reader}: version {version} after {seen}"
            assert version in published
            seen = version
            kept.append((cell, word))
            for _, held in kept:
                look(reader, held)
            if len(kept) == _PINS or random.random() < 0.5:
                free, held = kept.pop(0)
                look(reader, held)
                kernels.unpin(free, None)
        for free, _ in kept:
            kernels.unpin(free, None)

    def look(reader: int, word: int) -> None:
        for index in range(_NUMBERS):
            world.scheduler.step("data", 0)
            found = int(slot_of(word)[index])
            assert found == word >> at.SLOT_BITS, (
                f"reader {reader}: a number of {found} in version {word >> at.SLOT_BITS}"
            )

    world.run(0, publish)
    for reader in range(1, readers + 1):
        world.run(reader, read)
    world.disturb(random, reach, how, random.choice((0, 0, 1, 2)), 0)
    world.scheduler.run()
    if 0 not in world.dead:
        assert len(published) - 1 + left_out == number
        assert memory.array(current, 1, np.int64)[0] >> at.SLOT_BITS == published[-1]
        world.quietly(take_back)
        again = world.quietly(lambda: kernels.free_slot(current, lines, readers, slots))
        assert again >= 0, "all have given their pins back, or are dead, and no slot is free"
    return world.scheduler.steps
