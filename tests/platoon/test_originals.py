"""Programs written from the documents of Platoon 0.5 and 0.6, and the names that those have."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from platoon_support import SHARED_VARIABLES

import platoon
from platoon import ops, util
from platoon.channel import Controller, Worker
from platoon.training import global_dynamics


def test_a_controller_that_does_not_read_its_arguments(experiment: Any, port: int) -> None:
    """As the documents say: make it, call init_control with the port, then serve. The launcher starts the workers."""
    experiment.write(
        plain_controller=f"""
        from platoon.channel import Controller

        class Plain(Controller):
            asked = 0

            def handle_control(self, req, worker_id, req_info):
                self.asked += 1
                return "stop" if self.asked > 4 else "train"

        controller = Plain()
        controller.init_control({port})
        controller.serve()
        """,
        plain_worker=f"""
        import sys
        from platoon.channel import Worker
        worker = Worker({port})
        while worker.send_req("next") != "stop":
            pass
        print(worker.local_size, sys.argv[1:])
        """,
    )
    result = experiment.launch("plain", "-D", "cpu", "cpu", "-w=--rate 0.5")
    assert result.code == 0, result
    assert result.outputs() == ["2 ['--rate', '0.5']\n"] * 2


def test_pixel_sum_with_a_process_that_sends(experiment: Any, port: int) -> None:
    """One process answers requests, a child of it sends minibatches: two-dimensional arrays, row by row."""
    experiment.write(
        pixels_controller="""
        import sys, time
        from multiprocessing import get_context
        import numpy as np
        from platoon.channel import Controller

        class Pixels(Controller):
            def __init__(self, port, pixels, size, settings):
                super().__init__(**settings)
                self.port, self.pixels, self.size = port, pixels, size
                self.left = len(pixels) // size

            def start_sending(self):
                self.sender = get_context("fork").Process(target=self.send)
                self.sender.start()

            def send(self):
                self.init_data(self.port)
                for start in range(0, len(self.pixels), self.size):
                    self.send_mb(self.pixels[start : start + self.size])
                self.asocket.close()
                time.sleep(2)  # the documents' way to let workers take what is on its way

            def handle_control(self, req, worker_id, req_info):
                if req == "next":
                    return "train" if self.left > 0 else "stop"
                if req == "shape":
                    return self.pixels.shape[1]
                if req == "take":
                    take, self.left = min(2, self.left), self.left - 2
                    return max(0, take)

        parser = Controller.default_parser()
        parser.add_argument("--batch-port", type=int)
        args = parser.parse_args()
        pixels = np.arange(1200.0).reshape(120, 10)
        controller = Pixels(args.batch_port, pixels, 10, Controller.default_arguments(args))
        controller.start_sending()
        sys.exit(controller.serve())
        """,
        pixels_worker="""
        import argparse
        import numpy as np
        from platoon.channel import Worker
        from platoon.param_sync import ParamSyncRule

        class Sum(ParamSyncRule):
            def update_params(self, local, shared):
                shared[0] += local[0]
                local[0].fill(0)

        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-port", type=int)
        args = parser.parse_args()
        worker = Worker(control_port=5567, data_port=args.batch_port)
        total = np.zeros(worker.send_req("shape"))
        worker.init_shared_params([total], Sum())
        while worker.send_req("next") == "train":
            for _ in range(worker.send_req("take")):
                total += np.asarray(worker.recv_mb()).sum(axis=0)
            worker.sync_params(synchronous=True)
        worker.all_reduce(np.zeros(1))
        print(worker.shared_params[0].tolist() == np.arange(1200.0).reshape(120, 10).sum(axis=0).tolist())
        """,
    )
    result = experiment.launch("pixels", "-D", "cpu", f"-c=--batch-port {port}", f"-w=--batch-port {port}")
    assert result.code == 0, result
    assert result.outputs() == ["True\n"]


def test_ports_that_the_controller_was_told_reach_its_workers(experiment: Any, port: int) -> None:
    """An experiment with --data-port: `default_arguments` of its workers has it, and they never ask for it."""
    experiment.write(
        lstm_controller="""
        import sys, threading
        import numpy as np
        from platoon.channel import Controller

        class Lstm(Controller):
            def handle_control(self, req, worker_id, req_info):
                return "train"

        controller = Lstm(**Controller.default_arguments(Controller.default_parser().parse_args()))
        controller.init_control(5567)  # its workers know the port already, so it stays theirs

        def deal():
            for number in range(12):
                controller.send_mb([np.full((4, 3), number, "float32"), np.arange(4)])
            controller.end_mb()

        threading.Thread(target=deal, daemon=True).start()
        sys.exit(controller.serve())
        """,
        lstm_worker="""
        from platoon.channel import Worker
        args = Worker.default_parser().parse_args()
        worker = Worker(**Worker.default_arguments(args))
        assert worker.send_req("next") == "train"
        seen = [int(batch[0][0, 0]) for batch in iter(worker.recv_mb, [])]
        print(args.data_port, args.data_hwm, len(seen))
        """,
    )
    result = experiment.launch("lstm", "-D", "cpu", "cpu", f"-c=--data-port {port} --data-hwm 3")
    assert result.code == 0, result
    said = [text.split() for text in result.outputs()]
    assert [(words[0], words[1]) for words in said] == [(str(port), "3")] * 2
    assert sum(int(words[2]) for words in said) == 12


def test_the_older_names(experiment: Any) -> None:
    experiment.write(
        names_worker="""
        import numpy as np
        from platoon import ops
        from platoon.channel import Worker
        from platoon.param_sync import ASGD
        worker = Worker()
        worker.lock_params()
        worker.unlock_params()
        assert worker.csocket.type
        assert not hasattr(worker, "asocket")
        assert worker.device == "cpu"
        assert not hasattr(worker, "local_params")
        mine = [np.zeros(2)]
        worker.init_shared_params(mine, ASGD())
        assert worker.local_params is mine
        for operation, wanted in (("+", 3), ("mul", 2), ("maximum", 2), ("min", 1)):
            result = ops.AllReduce(operation)(np.full(2, worker.local_rank + 1))
            assert result.tolist() == [wanted] * 2, (operation, result)
        print("all there")
        """
    )
    result = experiment.launch("names", "-D", "cpu", "cpu")
    assert result.code == 0, result
    assert result.outputs() == ["all there\n"] * 2


@pytest.mark.parametrize("workers", [1, 3])
def test_closed_at_early_stopping(experiment: Any, workers: int) -> None:
    """As synchronous_lstm does: the answer arrives, the others wait in vain for who got it, or do not end at all."""
    experiment.write(
        early_controller="""
        import sys
        from platoon.channel import Controller, controller

        class Early(Controller):
            def handle_control(self, req, worker_id, req_info):
                self._close()
                return "stop"

        controller._CLOSE_SECONDS = 2.0
        sys.exit(Early(**Controller.default_arguments(Controller.default_parser().parse_args())).serve())
        """,
        early_worker="""
        import signal
        import numpy as np
        from platoon.channel import Worker
        worker = Worker(control_port=5567)
        worker.all_reduce(np.zeros(1))
        if worker.local_rank == 0:
            print(worker.send_req("error"))
            worker.close()
        elif worker.local_rank == 1:
            worker.all_reduce(np.zeros(1))
        else:
            signal.pause()
        """,
    )
    result = experiment.launch("early", "-D", *["cpu"] * workers)
    assert result.code == 0, result
    assert result.outputs()[0] == "stop\n"


def test_shared_variables(experiment: Any) -> None:
    """Those of PyTensor, and what has their methods."""
    experiment.write(
        variables_worker="""
    import pytensor

    class Variable:
        def __init__(self, value):
            self.value = value.copy()

        def get_value(self, borrow=False):
            return self.value if borrow else self.value.copy()

        def set_value(self, value, borrow=False):
            self.value = value

    makers = [pytensor.shared, Variable]
"""
        + SHARED_VARIABLES
    )
    assert experiment.train("variables", 2) == ["all there\n"] * 2


def test_a_subclass_may_have_attributes_of_any_name(port: int) -> None:
    """Programs for the original keep their data, processes and counts in the controller, by names of their own."""
    names = "data batches process requests members node hosts wake closed failed stopped serving open serve answer"

    class Own(Controller):
        def __init__(self) -> None:
            super().__init__(control_port=port, data_port=0)
            for name in names.split():
                setattr(self, f"_{name}", [name])

        def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
            return self._data  # type: ignore[attr-defined]

    controller = Own()
    serving = threading.Thread(target=controller.serve)
    serving.start()
    with Worker(control_port=port, socket_timeout=20_000) as worker:
        worker.init_mb_sock()
        assert worker.send_req("next") == ["data"]
        controller.send_mb([np.arange(3)])
        assert worker.recv_mb()[0].tolist() == [0, 1, 2]
    serving.join(60)
    assert not serving.is_alive()


class OwnRule(global_dynamics.GlobalDynamics):
    def make_rule(self, *args: Any) -> None:
        self._fn = lambda: args[0].append("called")


def test_a_rule_that_sets_its_function_as_the_originals_do() -> None:
    calls: list[str] = []
    rule = OwnRule()
    rule.make_rule(calls)
    rule()
    assert calls == ["called"]


def test_the_older_modules() -> None:
    import platoon.controller
    import platoon.worker

    assert platoon.controller.Controller is Controller
    assert platoon.worker.Worker is Worker


class OwnException(util.PlatoonException):
    """A user's, made as the original's are."""


def test_the_older_exceptions() -> None:
    cause = ValueError("why")
    error = util.PlatoonError("what", cause)
    assert isinstance(error, util.PlatoonException)
    assert (error.severity, error.descr, error.from_exc) == ("ERROR", "what", cause)
    assert str(error) == "what: ValueError: why"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert util.PlatoonWarning("what").severity == "WARNING"
    own = pickle.loads(pickle.dumps(OwnException("FATAL", "what", cause)))
    assert (own.severity, own.descr, str(own)) == ("FATAL", "what", str(error))


def test_names_of_mpi(experiment: Any) -> None:
    code = """
import numpy as np
import pytest
from mpi4py import MPI
from platoon import util
assert util.op_to_mpi("+") == util.op_to_mpi("SUM") == MPI.SUM
assert util.op_to_mpi("mul") == MPI.PROD
assert util.dtype_to_mpi("float32") == MPI.FLOAT
assert util.dtype_to_mpi("int8") == MPI.INT8_T
assert util.dtype_to_mpi(np.dtype("int64")) in (MPI.INT64_T, MPI.LONG)
with pytest.raises(ValueError, match="average"):
    util.op_to_mpi("average")
for dtype in ("float16", "object", "nonsense"):
    with pytest.raises(TypeError):
        util.dtype_to_mpi(dtype)
"""
    experiment.finish(experiment.start("-c", code))


def test_what_is_not_there_yet_is_said() -> None:
    controller = Controller()
    try:
        for name, call in (("asocket", "init_data"), ("csocket", "init_control")):
            with pytest.raises(AttributeError, match=call):
                getattr(controller, name)
    finally:
        controller.close()
    assert Worker.current() is None
    with pytest.raises(platoon.PlatoonError, match="scalar_op"):
        ops.AllReduce("nonsense")


def test_another_project_of_the_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "platoon").mkdir()
    monkeypatch.setattr(platoon, "__file__", str(tmp_path / "platoon" / "__init__.py"))
    platoon._notice_the_other()
    (tmp_path / "platoon-3.1.dist-info").mkdir()
    with pytest.warns(util.PlatoonWarning, match=r"platoon-3\.1\.dist-info .* another project"):
        platoon._notice_the_other()
