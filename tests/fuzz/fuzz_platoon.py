"""Platoon's ports under random bytes, from strangers and from workers that have lost their minds.

    python tests/fuzz/fuzz_platoon.py --seconds 60 --seed 7

A failure is printed with the seed and the number of the try, which lead to it again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import threading
import time
from typing import Any

import numpy as np
import zmq

from platoon.channel import Controller, Worker
from platoon.channel.door import knock
from platoon.channel.wire import dumps, unpack_arrays
from platoon.util import PlatoonError

_WORDS = ("platoon-hello", "platoon-data", "platoon-size", "platoon-bye", "platoon-all_reduce", "next")
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
    context = zmq.Context()
    tries, until = 0, time.monotonic() + seconds
    try:
        with Worker(control_port=controller.control_port) as worker:
            worker.init_mb_sock()
            while time.monotonic() < until:
                try:
                    _one(rng, controller, context)
                    if tries % _LOOK_EVERY == 0:
                        assert worker.send_req(tries) == tries
                        controller.send_mb([np.full(3, tries)])
                        assert worker.recv_mb()[0].tolist() == [tries] * 3
                except Exception as error:
                    raise AssertionError(f"seed {seed}, try {tries}: {error!r}") from error
                tries += 1
            assert worker.send_req("still there") == "still there", f"seed {seed}, after {tries} tries"
    finally:
        context.destroy(0)
        controller.stop()
        serving.join(30)
    return tries


def _one(rng: random.Random, controller: Controller, context: zmq.Context) -> None:
    data = controller._data()
    channel, port = rng.choice((("control", int(controller.control_port or 0)), ("data", data.port)))
    kind = rng.randrange(3)
    if kind == 0:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            raw.sendall(rng.choice((b"", b"\xff" + bytes(8) + b"\x7f")) + rng.randbytes(rng.randrange(300)))
    elif kind == 1:
        mad = context.socket(zmq.DEALER)
        mad.linger = 1000
        knock(mad, controller._secret, channel, port)
        for _ in range(rng.randrange(1, 8)):
            with contextlib.suppress(zmq.Again):
                mad.send_multipart([_bytes(rng) for _ in range(rng.choice((1, 2, 2, 2, 3)))], zmq.NOBLOCK)
        mad.close()
    else:
        frames = [zmq.Frame(_bytes(rng)) for _ in range(rng.randrange(1, 4))]
        with contextlib.suppress(PlatoonError):
            assert not any(array.dtype.hasobject for array in unpack_arrays(frames, rng.random() < 0.5))


def _bytes(rng: random.Random) -> bytes:
    """Returns something between noise and a message that is nearly right."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(40))
    if rng.random() < 0.05:
        return b"[" * rng.randrange(50_000)
    if rng.random() < 0.3:
        text = dumps({"req": _value(rng, 2), "worker_id": _value(rng, 0), "req_info": _value(rng, 3)})
    elif rng.random() < 0.5:
        entry = {"shape": _value(rng, 1), "dtype": rng.choice(_DTYPES), "fortran_order": False}
        text = dumps([entry] * rng.randrange(3))
    else:
        text = dumps(_value(rng, 4))
    changed = bytearray(text)
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
