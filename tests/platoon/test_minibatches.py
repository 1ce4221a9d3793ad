"""Minibatches: content and order, back pressure, the end, deaths, and requests meanwhile."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from platoon.channel import Controller, Worker
from platoon.channel.data import BatchClient
from platoon.util import PlatoonError

Pair = tuple[Controller, Worker]


class Echo(Controller):
    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        return req


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A controller that serves in a thread, and a worker, in one process: both ends in sight."""
    controller = Echo(control_port=0, data_port=0, data_hwm=3)
    controller.init_control(0)
    thread = threading.Thread(target=controller.serve)
    thread.start()
    worker = Worker(control_port=controller.control_port)
    worker.init_mb_sock()
    try:
        yield controller, worker
    finally:
        worker.close()
        thread.join(100)
        assert not thread.is_alive()


def test_content_shape_dtype_and_order_are_kept(pair: Pair) -> None:
    controller, worker = pair
    rng = np.random.default_rng(0)
    batch = [
        rng.standard_normal((3, 4)),
        np.asfortranarray(rng.standard_normal((5, 6)).astype(np.float32)),
        rng.integers(0, 9, (4, 4, 4))[::2, :, 1],
        np.zeros((0, 7), np.int32),
        np.array(3.5),
        np.array([True, False]),
        np.arange(4, dtype=">i2"),
        rng.standard_normal(9).astype(ml_dtypes.bfloat16),
    ]
    for copy in (True, False):
        controller.send_mb(batch, copy=copy)
        came = worker.recv_mb(copy=copy)
        assert len(came) == len(batch)
        for got, sent in zip(came, batch, strict=True):
            assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
            np.testing.assert_array_equal(got, sent)
        assert came[1].flags.f_contiguous
        assert came[0].flags.aligned or not copy
        assert came[0].flags.writeable or not copy


def test_minibatches_come_in_order_while_requests_are_answered(pair: Pair) -> None:
    controller, worker = pair
    number = 400

    def deal() -> None:
        buffer = np.empty(4096, np.int64)
        for i in range(number):
            buffer[:] = i  # one buffer for all: what is sent is what was there when it was sent
            controller.send_mb([buffer, np.array(i)])
        controller.end_mb()

    dealer = threading.Thread(target=deal)
    dealer.start()
    for i in range(number):
        data, index = worker.recv_mb()
        assert index == i
        assert (data == i).all()
        assert worker.send_req(i) == i
    assert worker.recv_mb() == []
    assert worker.recv_mb() == []
    dealer.join(100)
    with pytest.raises(PlatoonError, match="no more minibatches"):
        controller.send_mb([np.zeros(1)])


def test_a_worker_gets_no_more_than_it_has_room_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, worker = pair
    for i in range(3):
        controller.send_mb([np.array(i)])
    with monkeypatch.context() as patch, pytest.raises(PlatoonError, match="no worker had room for a minibatch"):
        patch.setattr("platoon.channel.controller._SEND_MB_SECONDS", 0.3)
        controller.send_mb([np.array(3)])
    assert [int(worker.recv_mb()[0]) for _ in range(3)] == [0, 1, 2]
    controller.send_mb([np.array(4)])
    assert int(worker.recv_mb()[0]) == 4


def test_what_was_not_opened_or_cannot_be_sent(pair: Pair) -> None:
    controller, worker = pair
    with pytest.raises(PlatoonError, match="at least one array"):
        controller.send_mb([])
    with pytest.raises(PlatoonError, match="already"):
        controller.init_data(0)
    with pytest.raises(PlatoonError, match="already"):
        worker.init_mb_sock()
    with pytest.raises(PlatoonError, match="cannot be sent"):
        controller.send_mb([np.array([{}])])


def test_none_in_time_is_an_error(pair: Pair) -> None:
    _, worker = pair
    worker._seconds = 0.2
    with pytest.raises(PlatoonError, match="a minibatch"):
        worker.recv_mb()


def test_both_ends_can_be_waited_for(pair: Pair) -> None:
    controller, worker = pair
    assert select.select([worker.asocket], [], [], 0)[0] == []
    controller.send_mb([np.zeros(1)])
    assert select.select([worker.asocket], [], [], 60)[0] == [worker.asocket]
    worker.recv_mb()  # which grants another one
    assert select.select([controller.asocket], [], [], 60)[0] == [controller.asocket]


def test_before_the_channel_is_open() -> None:
    controller = Controller(control_port=0)
    controller.init_control(0)
    with pytest.raises(PlatoonError, match=r"init_data\(\)"):
        controller.send_mb([np.zeros(1)])
    serving = threading.Thread(target=controller.serve)
    serving.start()
    refused = pytest.raises(PlatoonError, match="the controller sends no minibatches here")
    with Worker(control_port=controller.control_port) as worker, refused:
        worker.recv_mb()
    serving.join(60)
    assert not serving.is_alive()


DEALER = """
    import sys, threading
    import numpy as np
    from platoon.channel import Controller

    class Dealer(Controller):
        done = 0

        def handle_control(self, req, worker_id, req_info):
            if req == "done":
                self.done += req_info
            return self.done

        def deal(self):
            for i in range(60):
                self.send_mb([np.full(1000, i)])
            self.end_mb()

    args = Controller.default_parser().parse_args()
    dealer = Dealer(**{**Controller.default_arguments(args), "data_port": 0})
    threading.Thread(target=dealer.deal, daemon=True).start()
    code = dealer.serve()
    print("done", dealer.done)
    sys.exit(code)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_shares_them_out(experiment: Any, workers: int) -> None:
    experiment.write(
        deal_controller=DEALER,
        deal_worker="""
        from platoon import Worker
        worker = Worker()
        worker.init_mb_sock(data_hwm=2)
        while batch := worker.recv_mb():
            assert (batch[0] == batch[0][0]).all()
            worker.send_req("done", int(batch[0][0]))
        """,
    )
    result = experiment.launch("deal", "-D", *["cpu"] * workers)
    assert result.code == 0, result
    assert f"done {sum(range(60))}" in result.logs["controller.out"]


def test_a_dead_workers_credits_take_nobodys_minibatches(experiment: Any, port: int) -> None:
    experiment.write(
        worker="""
        import os, sys
        from platoon import Worker
        worker = Worker(control_port=int(sys.argv[1]))
        worker.init_mb_sock(data_hwm=10)
        worker.send_req("here")
        os.kill(os.getpid(), 9)
        """
    )
    controller = Echo(control_port=port, data_port=0)
    controller.init_control(port)
    thread = threading.Thread(target=controller.serve)
    thread.start()
    try:
        with Worker(control_port=port) as worker:
            dead = experiment.start("worker.py", str(port))
            experiment.finish(dead, -9)
            worker.init_mb_sock(data_hwm=2)
            dealer = threading.Thread(target=lambda: [controller.send_mb([np.array(i)]) for i in range(20)])
            dealer.start()
            received = [int(worker.recv_mb()[0]) for _ in range(20)]
            dealer.join(100)
            assert received == list(range(20))
            assert os.getpid() in controller._workers
    finally:
        controller.stop()
        thread.join(100)


def test_what_was_on_its_way_to_a_dead_worker_is_dealt_again(experiment: Any, port: int) -> None:
    experiment.write(
        worker="""
        import os, sys
        from platoon import Worker
        worker = Worker(control_port=int(sys.argv[1]))
        worker.init_mb_sock(data_hwm=8)
        first = int(worker.recv_mb()[0][0])
        worker.send_req(["received", first])
        worker.send_req("sent")
        os.kill(os.getpid(), 9)
        """
    )
    received, sent = threading.Event(), threading.Event()

    class Waits(Echo):
        def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
            if req == "sent":
                assert sent.wait(60)
            elif req == ["received", 0]:
                received.set()
            return req

    controller = Waits(control_port=port, data_port=0, data_hwm=10)
    controller.init_control(port)
    thread = threading.Thread(target=controller.serve)
    thread.start()
    values = np.zeros(100)
    try:
        dead = experiment.start("worker.py", str(port))
        with Worker(control_port=port) as worker:
            for i in range(6):
                values[:] = i  # it may change as soon as it is sent
                controller.send_mb([values])
            assert received.wait(60)
            sent.set()
            experiment.finish(dead, -9)
            worker.init_mb_sock(data_hwm=2)
            dealer = threading.Thread(target=lambda: [controller.send_mb([np.array([i])]) for i in range(6, 9)])
            dealer.start()
            came = [int(worker.recv_mb()[0][0]) for _ in range(8)]
            dealer.join(60)
            assert sorted(came) == [1, 2, 3, 4, 5, 6, 7, 8]
            controller.end_mb()
            assert worker.recv_mb() == []
    finally:
        controller.stop()
        thread.join(100)


SENDER = """
    import sys
    from multiprocessing import get_context
    import numpy as np
    from platoon.channel import Controller

    class Sends(Controller):
        def start(self, port, how):
            self.sender = get_context("fork").Process(target=self.send, args=(port, how))
            self.sender.start()

        def send(self, port, how):
            self.init_data(port)
            if how in ("closes", "ends"):
                self.send_mb([np.zeros(3)])
            if how.startswith("closes"):
                self.asocket.close()

        def handle_control(self, req, worker_id, req_info):
            if req == "its end":
                self.sender.join()
                return self.sender.pid
            return "train"

    controller = Sends(control_port=int(sys.argv[1]))
    controller.start(int(sys.argv[2]), sys.argv[3])
    print("serving", flush=True)
    sys.exit(controller.serve())
"""


@pytest.mark.parametrize("how", ["closes", "ends"])
def test_a_worker_does_not_wait_for_a_sender_that_has_ended(experiment: Any, port: int, how: str) -> None:
    """As two workers of the pixel sum did: both are told to train, and there is one minibatch left."""
    controller = experiment.write(controller=SENDER).start("controller.py", str(port), str(port), how)
    assert controller.stdout.readline() == "serving\n"
    with Worker(control_port=port) as worker:
        worker.init_mb_sock(port)
        assert worker.send_req("next") == "train"
        assert worker.recv_mb()[0].tolist() == [0, 0, 0]
        assert worker.send_req("next") == "train"
        if how == "closes":
            assert worker.recv_mb() == []
        else:
            with pytest.raises(
                PlatoonError, match=r"process \d+, which sent .* without end_mb.* waited for a minibatch"
            ):
                worker.recv_mb()
    experiment.finish(controller)


@pytest.mark.parametrize("how", ["closes at once", "ends at once"])
def test_a_worker_that_connects_after_the_sender_has_ended_does_not_wait(experiment: Any, port: int, how: str) -> None:
    controller = experiment.write(controller=SENDER).start("controller.py", str(port), str(port), how)
    assert controller.stdout.readline() == "serving\n"
    with Worker(control_port=port) as worker:
        sender = worker.send_req("its end")
        worker.init_mb_sock(port)
        if how == "closes at once":
            assert worker.recv_mb() == []
            assert worker.recv_mb() == []
        else:
            with pytest.raises(
                PlatoonError, match=rf"process {sender}, which sent .* on port {port}, .* without end_mb"
            ):
                worker.recv_mb()
    experiment.finish(controller)


def test_a_sender_that_says_its_end_after_it_was_asked_for_has_not_ended_without() -> None:
    """It opens, sends all to others and closes while a worker looks: what was said before its port closed is old."""

    class Asked:
        answers: ClassVar = [(0, False), (7, False), (7, True)]

        def connect(self, *_: Any) -> None:
            """Nobody is on the port, whenever this worker tries."""

        def wait(self, *_: Any) -> None: ...

        def ask(self, *_: Any) -> tuple[int, bool]:
            return self.answers.pop(0)

    assert BatchClient(5000, 1, Asked()).receive(True, 60) == []  # type: ignore[arg-type]


def test_a_worker_that_connects_after_the_controllers_channel_was_closed_gets_an_empty_list() -> None:
    controller = Echo(control_port=0, data_port=0)
    controller.init_control(0)
    port = controller.asocket.port
    controller.asocket.close()
    serving = threading.Thread(target=controller.serve)
    serving.start()
    with Worker(control_port=controller.control_port) as worker:
        worker.init_mb_sock(port)
        assert worker.recv_mb() == []
    serving.join(60)
    assert not serving.is_alive()


def test_a_worker_waits_for_a_sender_that_is_still_to_come(port: int) -> None:
    controller = Echo(control_port=0)
    controller.init_control(0)
    serving = threading.Thread(target=controller.serve)
    serving.start()
    with Worker(control_port=controller.control_port, socket_timeout=300) as worker:
        worker.init_mb_sock(port)
        with pytest.raises(PlatoonError, match=f"waited 0.3 s for a minibatch, and no sender is on port {port}"):
            worker.recv_mb()
    serving.join(60)
    assert not serving.is_alive()


def test_a_worker_does_not_wait_for_a_controller_that_has_ended(experiment: Any, port: int) -> None:
    controller = Echo(control_port=port, data_port=0)
    controller.init_control(port)
    experiment.write(
        worker="""
        import sys
        from platoon import PlatoonError, Worker
        worker = Worker(control_port=int(sys.argv[1]))
        worker.init_mb_sock()
        worker.send_req("waits")
        try:
            worker.recv_mb()
        except PlatoonError as error:
            print(error)
        """
    )
    asked = threading.Event()
    controller.handle_control = lambda req, *rest: asked.set()  # type: ignore[method-assign]
    thread = threading.Thread(target=controller.serve)
    thread.start()
    worker = experiment.start("worker.py", str(port))
    assert asked.wait(60)
    controller.stop()
    thread.join(100)
    assert "without end_mb(); this worker waited for a minibatch" in experiment.finish(worker)


def test_many_arrays_in_many_minibatches_wait_for_their_worker() -> None:
    """More than the socket holds unread: the sender waits, and loses nothing."""
    number = 60
    controller = Echo(control_port=0, data_port=0, data_hwm=number)
    controller.init_control(0)
    serving = threading.Thread(target=controller.serve)
    serving.start()
    batch = [np.array([i]) for i in range(400)]  # a header of some 20 KB
    dealer = threading.Thread(target=lambda: [controller.send_mb(batch) for _ in range(number)])
    with Worker(control_port=controller.control_port) as worker:
        worker.init_mb_sock(data_hwm=number)
        dealer.start()
        for _ in range(number):
            assert [int(array[0]) for array in worker.recv_mb()] == list(range(400))
    dealer.join(60)
    serving.join(60)
    assert not dealer.is_alive()
    assert not serving.is_alive()
