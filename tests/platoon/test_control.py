"""Requests and answers, with real controllers and workers, started by hand and by the launcher."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages
from platoon.channel import Controller, Worker
from platoon.channel.answering import Answering, Query
from platoon.channel.wire import dumps, socket_name
from platoon.reporting import Reporter
from platoon.util import PlatoonError

COUNTING = """
    import sys
    from platoon.channel import Controller

    class Counting(Controller):
        count = 0

        def handle_control(self, req, worker_id, req_info):
            if req == "who":
                return worker_id
            if req == "fail":
                raise RuntimeError("a defect in handle_control")
            if req == "unanswerable":
                return object()
            self.count += req_info["by"]
            return {"count": self.count, "from": worker_id}

    controller = Counting(control_port=int(sys.argv[1]))
    controller.init_control(int(sys.argv[1]))
    print("serving", flush=True)
    sys.exit(controller.serve())
"""


def serving(experiment: Any, port: int, code: str = COUNTING) -> Any:
    process = experiment.write(controller=code).start("controller.py", str(port))
    assert process.stdout.readline() == "serving\n"
    return process


def test_requests_by_hand(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    experiment.write(
        worker="""
        import os, sys
        from platoon import Worker
        worker = Worker(control_port=int(sys.argv[1]))
        assert Worker() is worker
        assert worker.send_req("who") == os.getpid()
        for i in range(100):
            assert worker.send_req("count", {"by": 1})["from"] == os.getpid()
        print(worker.local_rank)
        """
    )
    with Worker(control_port=port) as here:
        first = experiment.start("worker.py", str(port))
        second = experiment.start("worker.py", str(port))
        ranks = experiment.finish(first) + experiment.finish(second)
        assert here.send_req("count", {"by": 0})["count"] == 200
    # serve() ends by itself once all that came are gone: exit code 0
    experiment.finish(controller)
    assert set(ranks.split()) <= {"1", "2"}


def test_a_request_that_nobody_knows_ends_the_job_with_its_name(experiment: Any, port: int) -> None:
    controller = experiment.write(
        controller="""
        import sys
        from platoon.channel import Controller
        controller = Controller(control_port=int(sys.argv[1]))
        print("serving", flush=True)
        sys.exit(controller.serve())
        """
    ).start("controller.py", str(port))
    controller.stdout.readline()
    with (
        Worker(control_port=port) as worker,
        pytest.raises(PlatoonError, match=r"does not know .*'hello'.*no NAME_con"),
    ):
        worker.send_req("hello")
    assert "does not know the request 'hello'" in experiment.finish(controller, 1)


def test_an_error_in_handle_control_reaches_its_worker_and_ends_the_job(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    with Worker(control_port=port) as worker:
        with pytest.raises(PlatoonError, match="a defect in handle_control"):
            worker.send_req("fail")
        assert "a defect in handle_control" in experiment.finish(controller, 1)
        with pytest.raises(PlatoonError, match="is gone"):
            worker.send_req("who")


def test_an_answer_that_is_not_json_and_a_reserved_name(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    with Worker(control_port=port) as worker:
        with pytest.raises(PlatoonError, match="answers must be made of"):
            worker.send_req("unanswerable")
        with pytest.raises(PlatoonError, match="reserved"):
            worker.send_req("platoon-nonsense")
        with pytest.raises(PlatoonError, match="made of"):
            worker.send_req(object())
        assert worker.send_req("who") == os.getpid()
    with pytest.raises(PlatoonError, match="closed"):
        worker.send_req("who")
    experiment.finish(controller)


def test_no_controller_is_an_error_after_the_timeout(port: int) -> None:
    with pytest.raises(PlatoonError, match=f"on port {port}"):
        Worker(control_port=port, socket_timeout=200)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(experiment: Any, port: int) -> None:
    controller = serving(
        experiment,
        port,
        """
        import os, sys, time
        from platoon.channel import Controller

        class Slow(Controller):
            def handle_control(self, req, worker_id, req_info):
                while req == "late" and not os.path.exists("given-up"):
                    time.sleep(0.02)
                return req

        controller = Slow(control_port=int(sys.argv[1]))
        print("serving", flush=True)
        sys.exit(controller.serve())
        """,
    )
    with Worker(control_port=port) as worker:
        worker._requests._timeout_seconds = 0.3
        with pytest.raises(PlatoonError, match="for an answer to the request 'late'"):
            worker.send_req("late")
        (experiment.folder / "given-up").touch()
        worker._requests._timeout_seconds = 30
        assert worker.send_req("next") == "next"
    experiment.finish(controller)


def test_a_controller_that_is_killed_is_noticed_at_once(experiment: Any, port: int) -> None:
    controller = serving(
        experiment,
        port,
        """
        import os, signal, sys
        from platoon.channel import Controller

        class Dying(Controller):
            def handle_control(self, req, worker_id, req_info):
                os.kill(os.getpid(), signal.SIGKILL)

        controller = Dying(control_port=int(sys.argv[1]))
        print("serving", flush=True)
        sys.exit(controller.serve())
        """,
    )
    with Worker(control_port=port) as worker, pytest.raises(PlatoonError, match=r"controller \(process \d+\) is gone"):
        worker.send_req("next")
    experiment.finish(controller, -signal.SIGKILL)


def test_a_worker_that_is_killed_by_hand_is_noticed_and_named(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    experiment.write(
        worker="""
        import os, signal, sys
        from platoon import Worker
        worker = Worker(control_port=int(sys.argv[1]))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    worker = experiment.start("worker.py", str(port))
    experiment.finish(worker, -signal.SIGKILL)
    assert f"worker 0 (process {worker.pid}) ended without Worker.close()" in experiment.finish(controller)


def test_a_port_that_is_taken_is_named(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    with pytest.raises(PlatoonError, match=f"port {port}.*--control-port"):
        Controller(control_port=port).init_control(port)
    with Worker(control_port=port):  # it has been answered, so the signal meets serve()
        os.kill(controller.pid, signal.SIGTERM)
        assert "SIGTERM" in experiment.finish(controller, 1)


def test_the_controller_listens_on_no_network(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    sockets = {os.readlink(each) for each in Path(f"/proc/{controller.pid}/fd").iterdir() if each.is_symlink()}
    tables = [Path(f"/proc/net/{kind}").read_text().split() for kind in ("tcp", "tcp6", "udp", "unix")]
    mine = [sum(f"socket:[{word}]" in sockets for word in set(words)) for words in tables]
    assert mine[:3] == [0, 0, 0]
    assert mine[3] > 0
    with Worker(control_port=port):
        os.kill(controller.pid, signal.SIGINT)
        assert "interrupted" in experiment.finish(controller, 1)


def test_what_is_no_port_is_said() -> None:
    for number in (-1, 65536):
        controller = Controller()
        with pytest.raises(PlatoonError, match=f"from 1 to 65535, or 0 for a free one; got {number}"):
            controller.init_control(number)


def test_there_are_no_more_places_than_devices(experiment: Any, port: int) -> None:
    controller = serving(
        experiment,
        port,
        """
        import sys
        from platoon.channel import Controller
        controller = Controller(control_port=int(sys.argv[1]), devices=["cpu"])
        print("serving", flush=True)
        sys.exit(controller.serve())
        """,
    )
    experiment.write(
        worker="""
        import sys
        from platoon import PlatoonError, Worker
        try:
            Worker(control_port=int(sys.argv[1]))
        except PlatoonError as error:
            print(error)
        """
    )
    with Worker(control_port=port) as worker:
        assert (worker.local_size, worker.local_rank, worker.global_size) == (1, 0, 1)
        second = experiment.finish(experiment.start("worker.py", str(port)))
        assert "devices for 1 worker, and no more can come" in second
    experiment.finish(controller)


def test_a_forked_child_is_not_the_worker(experiment: Any, port: int) -> None:
    controller = serving(experiment, port)
    experiment.write(
        worker="""
        import os, sys
        from platoon import PlatoonError, Worker
        worker = Worker(control_port=int(sys.argv[1]))
        child = os.fork()
        if child == 0:
            try:
                worker.send_req("who")
            except PlatoonError as error:
                print("child:", error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("parent:", worker.send_req("who") == os.getpid())
        """
    )
    said = experiment.finish(experiment.start("worker.py", str(port)))
    assert re.search(r"child: this worker belongs to process \d+", said)
    assert "parent: True" in said
    experiment.finish(controller)


def test_requests_without_end_do_not_keep_an_end_from_being_noted(port: int) -> None:
    """Each answer has the next request come at once: what is read in one turn has to have an end all the same."""
    answered: list[int] = []

    def answer(query: Query) -> int:
        answered.append(1)
        if len(answered) < 10_000:
            ask()
        return 0

    def ask() -> None:
        link.tell({"do": "ask", "query": dumps({"req": "again", "req_info": None})})
        while messages.waiting(link.connection):
            messages.receive(link.connection)

    answering = Answering(port, Reporter(None), answer)
    link = NodeLink(messages.connect(socket_name("control", port), 10))
    ask()
    while not answered:
        assert answering.answer(all_of_them=True)
    assert 1 < len(answered) < 1000
    link.close()
    answering.door.close()


def test_a_killed_controller_is_missed_while_a_forked_child_of_it_lives(experiment: Any, port: int) -> None:
    experiment.write(
        controller="""
        import os, sys, time
        from platoon.channel import Controller

        class Forks(Controller):
            def handle_control(self, req, worker_id, req_info):
                child = os.fork()
                if child == 0:
                    time.sleep(1000)
                return child

        Forks(control_port=int(sys.argv[1])).serve()
        """
    )
    controller = experiment.start("controller.py", str(port))
    with Worker(control_port=port) as worker:
        child = worker.send_req("fork")
        try:
            controller.kill()
            with pytest.raises(PlatoonError, match=rf"the controller \(process {controller.pid}\) is gone"):
                worker.send_req("still there?")
        finally:
            os.kill(child, signal.SIGKILL)
    experiment.finish(controller, -signal.SIGKILL)
