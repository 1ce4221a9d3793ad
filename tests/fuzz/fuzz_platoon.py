"""Platoon's ports under random bytes, from strangers and from workers that have lost their minds.

    python tests/fuzz/fuzz_platoon.py --seconds 60 --seed 7

A failure is printed with the seed and the number of the try, which lead to it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import threading
import time
from typing import Any

import numpy as np

from multiverso.wire import messages
from platoon.channel import Controller, Worker
from platoon.channel.wire import dumps, socket_name, unpack_arrays
from platoon.util import PlatoonError

# and no "platoon-bye": it would be believed, as the worker is of this process
_WORDS = ("platoon-hello", "platoon-data", "platoon-sender", "platoon-size", "platoon-all_reduce", "next")
_KEYS = ("req", "worker_id", "req_info", "local_rank", "name", "bytes", "capacity", "dtype", "op", "shape")
_DTYPES = ("O", "|O", "f8", "<f4", "i8,O", "S0", "V8", "bfloat16", "M8[ns]", "f8" * 9)
_LOOK_EVERY = 64


class _Echo(Controller):
    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        return req


def fuzz(seconds: float, seed: int) -> int:
    """Talks nonsense to a controller for a time; returns how often.

    Raises:
        AssertionError: the controller stopped, or no longer serves a worker that behaves.
    """
    rng = random.Random(seed)
    controller = _Echo(control_port=0, data_port=0, data_hwm=2)
    controller.init_control(0)
    serving = threading.Thread(target=controller.serve, name="fuzzed controller")
    serving.start()
    tries, until = 0, time.monotonic() + seconds
    try:
        with Worker(control_port=controller.control_port) as worker:
            worker.init_mb_sock()
            while time.monotonic() < until:
                try:
                    _one(rng, controller)
                    if tries % _LOOK_EVERY == 0:
                        assert worker.send_req(tries) == tries
                        controller.send_mb([np.full(3, tries)])
                        assert worker.recv_mb()[0].tolist() == [tries] * 3
                except Exception as error:
                    raise AssertionError(f"seed {seed}, try {tries}: {error!r}") from error
                tries += 1
            assert worker.send_req("still there") == "still there", f"seed {seed}, after {tries} tries"
    finally:
        controller.stop()
        serving.join(30)
    return tries


def _one(rng: random.Random, controller: Controller) -> None:
    port = {"control": int(controller.control_port or 0), "data": controller.asocket.port}
    channel = rng.choice(sorted(port))
    if rng.randrange(3):
        with contextlib.suppress(OSError), messages.connect(socket_name(channel, port[channel]), 20) as mad:
            mad.setblocking(False)
            for _ in range(rng.randrange(1, 8)):
                mad.send(_bytes(rng))
        return
    memory = os.memfd_create("fuzz")
    try:
        os.write(memory, rng.randbytes(rng.randrange(300)))
        with contextlib.suppress(PlatoonError, ValueError):
            header = json.loads(_bytes(rng))
            arrays = unpack_arrays(header, [memory] * rng.choice((0, 1, 1, 1, 2)), rng.random() < 0.5)
            assert not any(array.dtype.hasobject for array in arrays)
    except RecursionError:
        pass  # json's, of a text that is read here and not by platoon
    finally:
        os.close(memory)


def _bytes(rng: random.Random) -> bytes:
    """Returns something between noise and a message that is nearly right."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(40))
    if rng.random() < 0.05:
        return b"[" * rng.randrange(50_000)
    if rng.random() < 0.3:
        query = dumps({"req": _value(rng, 2), "req_info": _value(rng, 3)})
        grant = {"do": "grant", "room": _value(rng, 0), "received": rng.random() < 0.5, "kept": False}
        text = dumps(rng.choice(({"do": "ask", "id": 1, "query": query}, grant)))
    elif rng.random() < 0.5:
        entry = {"shape": _value(rng, 1), "dtype": rng.choice(_DTYPES), "fortran_order": False}
        text = dumps([entry] * rng.randrange(3))
    else:
        text = dumps(_value(rng, 4))
    changed = bytearray(text.encode())
    for _ in range(rng.randrange(3)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice((None, True, False, float("inf"), -1.5))
    if kind == 1:
        return rng.choice((0, 1, -1, 2**31, 2**63, 10**40, rng.randrange(100)))
    if kind in (2, 3):
        return rng.choice((*_WORDS, *_DTYPES))
    if kind == 4:
        return ""
    if kind == 5:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(_KEYS): _value(rng, depth - 1) for _ in range(rng.randrange(5))}


def main() -> None:
    """Runs it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    args = parser.parse_args()
    print(f"platoon: {fuzz(args.seconds, args.seed)} tries, seed {args.seed}")


if __name__ == "__main__":
    main()
