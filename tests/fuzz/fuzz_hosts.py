"""Sends a host's port, and the code behind it, what no host would, for a given time and seed: nothing may change.

    python tests/fuzz/fuzz_hosts.py --seconds 60 --seed 7

At the port: random bytes, and first messages of a real host with bytes changed, cut off or repeated. Behind it, as only
a host that knows the secret could: frames with any field changed, in any order. The first are refused and change
nothing; the second end in ProtocolError or do what they say, and never in another error, or in memory that is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "hosts"))

from fabric_support import Adder, barrier, fabrics, new_shard

from multiverso.hosts.codecs import NAMES, NATIVE, Wire, longest
from multiverso.hosts.options import Every
from multiverso.hosts.peer.frames import HEADER_BYTES, RECEIVED, Header, Numbered, ProtocolError, Reader
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.rounds.frames import AT, REACHED, SUM, TOTAL
from multiverso.hosts.rounds.frames import KINDS as KINDS_OF_ROUNDS
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.handshake import Hello
from multiverso.hosts.values import frames
from multiverso.hosts.values.copies import Changes, Copy
from multiverso.hosts.values.frames import Opened
from multiverso.hosts.values.link import Link
from multiverso.hosts.values.state import Held
from multiverso.shards.shard import Shard
from multiverso.spec.table import TableSpec

MOST_GROWTH_BYTES = 64 << 20
_FRAMES_AT_ONCE = 400
_LEAST_ROUNDS = 10  # however little time there is
_NUMBERS = (0, 1, 2, 3, 7, 8, 255, 256, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def run(seconds: float, seed: int, least: int = 0) -> int:
    """Returns how many frames and strangers there were; an AssertionError says what is wrong."""
    source = random.Random(seed)
    tried = rounds = 0
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(fabrics(2, job := new_credentials(encrypted=False), share=0))
        stack.callback(_shard.cache_clear)
        shards = [new_shard(TableSpec("array", 1, 1000)) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        for shard in shards:
            Adder(shard).add(np.ones(1000))
        barrier(made)
        hello = Hello(1, 2, 5).pack(job)
        place = made[1].peers._addresses[0]
        grown, until = 0, time.monotonic() + seconds
        while rounds < _LEAST_ROUNDS or tried < least or time.monotonic() < until:
            rounds += 1
            tried += _frames(source) + _sums(source)
            tried += _stranger(place, source, hello)
            grown = grown or _resident()  # what the first round takes is no growth
        assert _resident() - grown < MOST_GROWTH_BYTES, "it takes more and more memory"
        assert all(np.all(shard.values() == 2) for shard in shards), "a stranger has changed a value"
        for shard in shards:
            Adder(shard).add(np.ones(1000))
        barrier(made)
        assert all(np.all(shard.values() == 4) for shard in shards)
        for _ in range(1000):  # the last strangers are shown out
            if not any(thread.name == "multiverso-fabric-door" for thread in threading.enumerate()):
                break
            threading.Event().wait(0.02)
    return tried


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _stranger(place: tuple[str, int], source: random.Random, hello: bytes) -> int:
    """One that connects without the secret."""
    data = bytearray(hello if source.random() < 0.7 else source.randbytes(source.randint(0, 300)))
    for _ in range(source.choice((0, 1, 1, 3, 20))):
        if data:
            data[source.randrange(len(data))] = source.randrange(256)
    if source.random() < 0.3:
        del data[source.randint(0, len(data)) :]
    data += source.randbytes(source.choice((0, 0, 32, 500)))
    with contextlib.suppress(OSError), socket.create_connection(place, 5) as connection:
        connection.settimeout(5)
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    return 1


def _frames(source: random.Random) -> int:
    """One link after another whose peer says anything, each until that is refused."""
    done = 0
    while done < _FRAMES_AT_ONCE:
        done += _until_refused(source, _FRAMES_AT_ONCE - done)
    return done


@functools.cache
def _shard(spec: TableSpec) -> Shard:
    """Memory that all links use, one after another: to make it takes longer than all that is said to one."""
    return new_shard(spec)


def _until_refused(source: random.Random, most: int) -> int:
    spec = TableSpec("array", 1, source.choice((1, 40)), source.choice(("float32", "int64")))
    shard = _shard(spec)
    shard.values()[:] = 0
    copy, link = Copy(shard, 64), Link(0, 1, Pace(0))
    homes = [source.randrange(2) for _ in copy.chunks]
    wire = Wire.of(source.choice(NAMES), spec.dtype)
    link.attach(1, Held(copy, Changes(), homes, wire, Every()))
    link.connect(1)
    around = Neighbour(Rounds(0, range(2), lambda peer: None), 1)
    around.connect(1)
    readers: dict[Numbered, Reader] = {end: Reader() for end in (link, around)}  # each protocol has a connection
    opened = Opened(copy.elements, ("float32", "float64", "int32", "int64").index(spec.dtype), copy.chunks[0].size, 0)
    _feed(readers[link], link, Header(frames.OPEN, table=1, length=24, number=1).pack() + frames.OPENED.pack(*opened))
    done = 0
    try:
        while done < most:
            done += 1
            link.look(0.0)
            while (sent := link.next(0.0)) is not None and sent.header.kind != frames.PUSH:
                pass
            while around.next(0.0) is not None:
                pass
            end: Link | Neighbour = source.choice((link, link, around))
            data = _frame(source, spec, link, end, None if sent is None else sent.header)
            _feed(readers[end], end, data)
    except ProtocolError:
        link.cut()
    return done


class _Staged(RoundMemory):
    """A table of rounds to which each host adds ones."""

    def __init__(self, source: random.Random) -> None:
        self.elements, self.chunk, self.dtype = 40, 16, np.dtype("float32")
        self.wire, self.extra = Wire.of(source.choice((*NAMES, "topk:1")), "float32"), source.choice((0, 2))

    def members(self, number: int) -> int | None:
        return 1

    def wanted(self, number: int) -> bool:
        return True

    def decide(self, number: int, members: int) -> int:
        return members

    def fold(self, number: int, chunk: int, members: int, total: np.ndarray, count: int) -> int:
        total[:] = total + 1 if count else 1
        return count + 1

    def take(self, number: int, chunk: int, total: np.ndarray, count: int) -> None:
        assert total.size >= min(self.chunk, self.elements - chunk * self.chunk) or not count


def _sums(source: random.Random) -> int:
    """The middle of a chain of three hosts, whose neighbours send any sums and totals, each until that is refused."""
    done = 0
    while done < _FRAMES_AT_ONCE:
        staged, rounds = _Staged(source), Rounds(1, range(3), lambda peer: None)
        ends = [Neighbour(rounds, peer) for peer in (0, 2)]
        rounds.attach(1, staged)
        rounds.begin(1)
        table = rounds.tables[1]
        try:
            for end in ends:
                end.connect(1)
                _feed(Reader(), end, Header(AT, table=1, length=32, number=1).pack() + REACHED.pack(0, 0, 40, 0, 16))
            for _ in range(_FRAMES_AT_ONCE):
                done += 1
                end = source.choice(ends)
                kind, last = (SUM, table.received) if end is ends[0] else (TOTAL, table.arrived)
                number = (last % table.chunks, last >= table.chunks)
                native = 4 * (min(16, 40 - 16 * number[0]) + staged.extra * number[1])
                code = source.choice((NATIVE, staged.wire.number if number[1] else NATIVE))
                longest_one = longest(code, min(16, 40 - 16 * number[0]), 4) + 4 * staged.extra
                length = source.choice((native, longest_one, longest_one, source.randrange(200)))
                flags = code << 3 | (last + 1 - table.arrived << 8 if kind == SUM else 0)
                body = source.randbytes(length) if source.random() < 0.5 else bytes(length)
                header = Header(kind, 0, flags, 1, 1, length, last + 1, end._received + 1, end._sent)
                _feed(Reader(), end, header.pack() + body)
                for each in ends:
                    while each.next(0.0) is not None:
                        pass
        except ProtocolError:
            continue
    return done


def _frame(source: random.Random, spec: TableSpec, link: Link, end: Link | Neighbour, sent: Header | None) -> bytes:
    """A frame that is nearly right: an answer to what was sent, or a push, with some of it changed."""
    size = min(spec.elements, 64 // spec.itemsize) * spec.itemsize
    fields: dict[str, Any] = {
        "kind": source.choice(sorted(frames.KINDS if end is link else KINDS_OF_ROUNDS)),
        "table": 1,
        "chunk": source.randrange(4),
        "length": size,
        "step": source.choice((1, 1, 2, 3)),
        "received": end._sent,
    }
    if end is link and sent is not None and source.random() < 0.6:
        fields |= {"kind": frames.ANSWER, "chunk": sent.chunk}
    if fields["kind"] != RECEIVED:
        fields["number"] = end._received + 1
    here = link._tables[1].here.get(fields["chunk"])
    if fields["kind"] == frames.PUSH and here is not None and here.fresh:
        fields["flags"] = frames.FRESH
    if fields["kind"] in (frames.CLOSE, frames.NEWS, RECEIVED):
        fields["length"] = 0
    if fields["kind"] == frames.OPEN:
        fields["length"] = 24
    for _ in range(source.choice((0, 0, 0, 1, 1, 3))):
        name = source.choice(("kind", "wire", "flags", "table", "chunk", "length", "step", "number", "received"))
        most = {"kind": 255, "wire": 255, "flags": 65535}.get(name, 2**32 - 1)
        fields[name] = min(most, source.choice((*_NUMBERS, source.randrange(8))))
    body = source.randbytes(min(fields["length"], 400))
    return Header(**fields).pack() + body


def _feed(reader: Reader, carried: Numbered, data: bytes) -> None:
    while data:
        room = reader.room()
        count = min(len(room), len(data), HEADER_BYTES)
        room[:count] = data[:count]
        data = data[count:]
        reader.filled(count)
        while True:
            begun = reader.begin()
            whole = reader.whole() if begun is None else reader.place(carried.accept(begun))
            if whole is None:
                break
            with np.errstate(all="ignore"):
                carried.arrived(*whole, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames", type=int, default=100_000, help="and at least so many, however long they take")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"the ports between hosts, from seed {seed}: ", end="", flush=True)
    print(f"{run(options.seconds, seed, options.frames)} frames and strangers, nothing wrong")


if __name__ == "__main__":
    main()
