"""Parameters that meet in shared memory: the rules' invariants, the job's lock, and deaths."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from multiverso.errors import OutOfMemoryError
from platoon.channel import sharing
from platoon.param_sync import ASGD, EASGD, ParamSyncRule
from platoon.params import adapt
from platoon.training import param_sync as other_name
from platoon.util import PlatoonError

# A controller that workers meet at by hand: they come and go, and "meet" makes them begin together.
OPEN = """
    import sys
    from platoon.channel import Controller

    class Open(Controller):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.there, self.facts = set(), {}

        def handle_control(self, req, worker_id, req_info):
            if req == "meet":
                self.there.add(worker_id)
                return len(self.there) >= req_info
            if req == "tell":
                self.facts.update(req_info)
            return self.facts

    controller = Open(control_port=int(sys.argv[1]))
    controller.init_control(int(sys.argv[1]))
    print("serving", flush=True)
    sys.exit(controller.serve())
"""
HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    from platoon import Worker, PlatoonError
    from platoon.param_sync import ASGD, EASGD, ParamSyncRule
    from multiverso.errors import MultiversoError, WaitTimeoutError

    port, number = int(sys.argv[1]), int(sys.argv[2])
    worker = Worker(control_port=port)

    def wait(condition):
        end = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < end
            threading.Event().wait(0.005)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)
"""


def start(experiment: Any, port: int, number: int, body: str, **more: str) -> list[Any]:
    """Starts an open controller and workers 0 to number - 1 with one program; returns all of them."""
    experiment.write(controller=OPEN)
    (experiment.folder / "worker.py").write_text(dedent(HEAD) + dedent(body))
    controller = experiment.start("controller.py", str(port))
    assert controller.stdout.readline() == "serving\n"
    return [controller, *(experiment.start("worker.py", str(port), str(i)) for i in range(number))]


def dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


def test_the_older_path_has_the_same_rules() -> None:
    assert (other_name.EASGD, other_name.ASGD, other_name.ParamSyncRule) == (EASGD, ASGD, ParamSyncRule)


def test_parameters_that_share_memory_are_refused() -> None:
    one, other = np.zeros(6), np.zeros((2, 3))
    assert len(adapt([one, other, one[:0]])) == 3
    for given, said in (
        ([one, other, one], "parameters 0 and 2 are the same one"),
        ([one[:3], other, one[1:]], "parameters 0 and 2 share memory"),
    ):
        with pytest.raises(PlatoonError, match=said):
            adapt(given)
    assert len(adapt([one[::2], one[1::2]])) == 2


def test_the_rules_in_numpy() -> None:
    rule = EASGD(0.25)
    local, centre = [np.array([4.0, 0.0])], [np.array([0.0, 8.0])]
    rule.update_params(local, centre)
    np.testing.assert_array_equal(local[0], [3.0, 2.0])
    np.testing.assert_array_equal(centre[0], [1.0, 6.0])
    rule.set_alpha(1)
    assert rule.get_alpha() == 1.0
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            rule.set_alpha(bad)
    mine = np.zeros(2)
    update = ASGD().make_update_function([mine])
    mine += 3
    centre = [np.array([10.0, 20.0])]
    update(centre)
    np.testing.assert_array_equal(mine, [13.0, 23.0])
    np.testing.assert_array_equal(centre[0], mine)
    with pytest.raises(NotImplementedError, match="overrides none"):
        ParamSyncRule().make_update_function([mine])([centre[0]])


def test_asgd_adds_up_exactly_under_contention(experiment: Any) -> None:
    """Four workers, integers as floats: the centre is the initial value plus all deltas, to the last bit."""
    experiment.write(
        sum_worker="""
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import ASGD
        worker = Worker()
        shapes = [(300, 400), (7,), ()]
        mine = [np.full(shape, 5, dtype) for shape, dtype in zip(shapes, ("f4", "f8", "i8"))]
        worker.init_shared_params(mine, ASGD())
        worker.copy_to_local()
        for step in range(60):
            for array in mine:
                array += worker.local_rank + 1
            worker.sync_params(synchronous=step % 2 == 0)
        worker.all_reduce(np.zeros(1))
        worker.copy_to_local()
        for array, shared in zip(mine, worker.shared_params):
            assert (array == 5 + 60 * (1 + 2 + 3 + 4)).all(), array
            assert shared.shape == array.shape and shared.dtype == array.dtype
            assert (shared == array).all()
        print("exact")
        """
    )
    assert experiment.train("sum", 4) == ["exact\n"] * 4


def test_easgd_keeps_the_sum_under_contention(experiment: Any) -> None:
    """Each exchange moves as much into the centre as out of the worker: the sum over all stays."""
    experiment.write(
        elastic_worker="""
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import EASGD
        worker = Worker()
        rank = worker.local_rank
        mine = [np.random.default_rng(rank).standard_normal(200_000), np.full(5, rank, np.float64)]
        rule = EASGD(0.3)
        worker.init_shared_params(mine, rule)
        for array in mine:  # away from the centre in every worker, whoever exchanges first, and however often
            array += np.random.default_rng(10 + rank).standard_normal(array.size)
        begin = [array.copy() for array in mine]
        worker.all_reduce(np.zeros(1))
        before = [worker.all_reduce(array) + shared for array, shared in zip(mine, worker.shared_params)]
        worker.all_reduce(np.zeros(1))
        for step in range(40):
            rule.set_alpha(0.1 + step / 100)
            worker.sync_params(synchronous=step % 2 == 0)
        worker.all_reduce(np.zeros(1))
        after = [worker.all_reduce(array) + shared for array, shared in zip(mine, worker.shared_params)]
        for one, other in zip(before, after):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        assert not np.array_equal(begin[0], mine[0])
        print("kept")
        """
    )
    assert experiment.train("elastic", 4) == ["kept\n"] * 4


def test_asgd_survives_kills_at_random_moments(experiment: Any, port: int) -> None:
    """Two of four workers are killed in the middle: of their last push each element has all or nothing."""
    controller, *workers = start(
        experiment,
        port,
        4,
        """
        mine = [np.zeros(400_000, np.float32)]
        worker.init_shared_params(mine, ASGD())
        wait(lambda: worker.send_req("meet", 4))
        unit = [1, 1000, 1, 1000][number]
        if number in (1, 3):
            threading.Thread(target=lambda: (threading.Event().wait(0.05 * number), die())).start()
        steps = 0
        while number in (1, 3) or steps < 60:
            mine[0] += unit
            worker.sync_params()
            steps += 1
        wait(lambda: worker.send_req("tell", {f"left{number}": 1}).keys() >= {"left0", "left2"})
        wait(lambda: worker.local_size <= 2)  # fewer when the other survivor is through
        total = worker.shared_params[0]
        assert (total % 1000 == 120).all(), total
        # the two dead ones are each at most one push apart over the whole array
        assert len(np.unique(total)) <= 3, np.unique(total)
        print("whole")
        """,
    )
    for process in (workers[1], workers[3]):
        experiment.finish(process, -signal.SIGKILL)
    assert [experiment.finish(workers[i]) for i in (0, 2)] == ["whole\n"] * 2
    experiment.finish(controller)


def test_a_rule_of_ones_own_has_the_parameters_alone(experiment: Any) -> None:
    experiment.write(
        own_worker="""
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import EASGD, ParamSyncRule

        class Sum(ParamSyncRule):
            def update_params(self, local_params, master_params):
                before = master_params[0].copy()
                master_params[0] += local_params[0]
                assert (master_params[0] == before + local_params[0]).all()
                local_params[0].fill(0)

        class Swap(EASGD):
            def update_params(self, local_params, master_params):
                for local, master in zip(local_params, master_params):
                    local[...], master[...] = master.copy(), local.copy()

        worker = Worker()
        mine = [np.zeros(50_000)]
        worker.init_shared_params(mine, Sum())
        for _ in range(40):
            mine[0] += 1
            worker.sync_params()
            assert (mine[0] == 0).all()
        worker.all_reduce(np.zeros(1))
        assert (worker.shared_params[0] == 120).all()
        worker.all_reduce(np.zeros(1))
        if worker.local_rank == 0:
            worker.init_shared_params(mine, Swap(0.5))
            worker.sync_params()
            assert (mine[0] == 120).all() and (worker.shared_params[0] == 0).all()
        print("alone")
        """
    )
    assert experiment.train("own", 3) == ["alone\n"] * 3


def test_nothing_comes_between_lock_and_unlock(experiment: Any) -> None:
    """Under lock() the shared parameters are read and written with gaps; no sync_params falls into one."""
    experiment.write(
        lock_worker="""
        import numpy as np
        from platoon import Worker, PlatoonError
        from platoon.param_sync import ASGD
        worker = Worker()
        mine = [np.zeros(100_000, np.float64)]
        worker.init_shared_params(mine, ASGD())
        for step in range(30):
            if (step + worker.local_rank) % 3 == 0:
                worker.lock()
                shared = worker.shared_params[0]
                before = shared.copy()
                worker.sync_params()      # one's own lock is no obstacle
                worker.copy_to_local()
                assert (shared == before + 0).all() or (shared - before == shared[0] - before[0]).all()
                seen = shared.copy()
                for part in np.array_split(shared, 50):
                    part += 1
                assert (shared == seen + 1).all()
                worker.copy_to_local()
                worker.unlock()
            else:
                mine[0] += 1
                worker.sync_params()
        worker.all_reduce(np.zeros(1))
        assert (worker.shared_params[0] == 120).all(), worker.shared_params[0]
        for wrong in (worker.unlock, lambda: (worker.lock(), worker.lock())):
            try:
                wrong()
            except PlatoonError as error:
                print(error)
            else:
                raise AssertionError("not refused")
            if wrong == worker.unlock:
                worker.all_reduce(np.zeros(1))
            else:
                worker.unlock()
        """
    )
    said = experiment.train("lock", 4)
    assert "unlock() without lock()" in said[0]
    assert "has the lock already" in said[0]


def test_a_lock_that_another_keeps(experiment: Any, port: int) -> None:
    controller, first, second = start(
        experiment,
        port,
        2,
        """
        worker.init_shared_params([np.zeros(3)], EASGD(0.5))
        if number == 0:
            worker.lock()
            worker.send_req("tell", {"held": os.getpid()})
            wait(lambda: "seen" in worker.send_req("facts"))
            worker.unlock()
        else:
            wait(lambda: "held" in worker.send_req("facts"))
            for timeout in (0, 0.2):
                try:
                    worker.lock(timeout)
                except WaitTimeoutError as error:
                    print(error)
            worker.sync_params(synchronous=False)
            worker.copy_to_global(synchronous=False)
            worker.send_req("tell", {"seen": 1})
            worker.lock()
            worker.unlock()
        """,
    )
    experiment.finish(first)
    said = experiment.finish(second)
    assert said.count(f"process {first.pid} holds the lock") == 2
    experiment.finish(controller)


@pytest.mark.parametrize("where", ["holding the lock", "in sync_params", "waiting for the lock"])
def test_a_worker_that_is_killed_hinders_nobody(experiment: Any, port: int, where: str) -> None:
    """By hand, where the others go on: the lock is free again and everything works."""
    controller, dies, other, third = start(
        experiment,
        port,
        3,
        f"""
        where = {where!r}
        mine = [np.zeros(200_000)]
        worker.init_shared_params(mine, ASGD())
        wait(lambda: worker.send_req("meet", 3))
        if number == 0:
            if where == "holding the lock":
                worker.lock()
                worker.send_req("tell", {{"ready": 1}})
                die()
            wait(lambda: "held" in worker.send_req("facts"))
            worker.send_req("tell", {{"ready": 1}})
            threading.Timer(0.3, die).start()
            worker.sync_params() if where == "in sync_params" else worker.lock()
        if number == 1:
            if where != "holding the lock":
                worker.lock()
                worker.send_req("tell", {{"held": 1}})
                wait(lambda: worker.local_size == 2)
                worker.unlock()
        wait(lambda: "ready" in worker.send_req("facts"))
        for _ in range(5):
            mine[0] += 1
            worker.sync_params()
            worker.lock()
            worker.copy_to_local()
            worker.unlock()
        worker.send_req("tell", {{f"done{{number}}": 1}})
        wait(lambda: worker.send_req("facts").keys() >= {{"done1", "done2"}})
        assert (worker.shared_params[0] == 10).all(), worker.shared_params[0]
        print("went on")
        """,
    )
    experiment.finish(dies, -signal.SIGKILL)
    assert [experiment.finish(process) for process in (other, third)] == ["went on\n"] * 2
    experiment.finish(controller)


def test_latecomers_get_the_live_values(experiment: Any, port: int) -> None:
    controller, *workers = start(
        experiment,
        port,
        3,
        """
        wait(lambda: number == 0 or f"done{number - 1}" in worker.send_req("facts"))
        mine = [np.full(4, 100.0 * (number + 1))]
        worker.init_shared_params(mine, ASGD())
        assert (worker.shared_params[0] == 100 + number).all()
        worker.copy_to_local()
        assert (mine[0] == 100 + number).all()
        mine[0] += 1
        worker.sync_params()
        worker.send_req("tell", {f"done{number}": 1})
        wait(lambda: "done2" in worker.send_req("facts"))
        """,
    )
    for process in (*workers, controller):
        experiment.finish(process)


def test_parameters_that_do_not_fit_are_refused(experiment: Any, port: int) -> None:
    controller, process = start(
        experiment,
        port,
        1,
        """
        def refused(call, *words):
            try:
                call()
            except (PlatoonError, ValueError) as error:
                assert all(word in str(error) for word in words), error
            else:
                raise AssertionError("not refused")

        refused(worker.sync_params, "init_shared_params")
        refused(lambda: worker.shared_params, "init_shared_params")
        refused(lambda: worker.init_shared_params([], EASGD(0.5)), "empty")
        refused(lambda: worker.init_shared_params([np.zeros((0, 3))], EASGD(0.5)), "no elements")
        refused(lambda: worker.init_shared_params([np.zeros(3, complex)], EASGD(0.5)), "complex128")
        refused(lambda: worker.init_shared_params(["weights"], EASGD(0.5)), "str is not a parameter")
        for rule, words in ((EASGD, "got EASGD: call it"), ("easgd", "got 'easgd'"), (0.5, "EASGD(0.5)")):
            refused(lambda: worker.init_shared_params([np.zeros(7)], rule), words)  # and no table is made
        locked = np.zeros(3)
        locked.flags.writeable = False
        refused(lambda: worker.init_shared_params([locked], EASGD(0.5)), "read-only")
        refused(lambda: worker.init_shared_params([np.zeros(9, np.int32)], EASGD(0.5)), "int32")  # nor here
        worker.init_shared_params([np.zeros(3), np.zeros((2, 2), np.int32)], ASGD())
        turned = [np.zeros(3), np.zeros(4, np.int32)]
        refused(lambda: worker.init_shared_params(turned, ASGD()), "parameter 1", "(2, 2)", "(4,)")
        refused(lambda: worker.init_shared_params([np.zeros(5)], ASGD()), "parameter 0", "same order")
        refused(lambda: worker.init_shared_params([np.zeros(3, np.float32)], ASGD()), "parameter 0")
        whole = [np.zeros(3), np.zeros(4, np.int32)]
        refused(lambda: worker.init_shared_params(whole, EASGD(0.5)), "int32")
        refused(lambda: worker.all_reduce(np.zeros(3)), "-D cpu cpu")
        """,
    )
    experiment.finish(process)
    experiment.finish(controller)


def test_arrays_that_cannot_be_worked_on_in_place(experiment: Any, port: int) -> None:
    """Transposed, strided and 16-bit parameters go through a copy; float16 is shared as float32."""
    controller, process = start(
        experiment,
        port,
        1,
        """
        grid = np.arange(24, dtype=np.float32).reshape(4, 6)
        half = np.ones((3, 2), np.float16)
        mine = [grid.T, grid[::2, ::3].copy()[:, ::2], half, np.asfortranarray(grid)]
        worker.init_shared_params(mine, ASGD())
        assert [shared.dtype.name for shared in worker.shared_params] == ["float32"] * 4
        np.testing.assert_array_equal(worker.shared_params[0], grid.T)
        for array in mine:
            array += 1
        expected = [array.copy() for array in mine]
        worker.lock()
        for shared in worker.shared_params:
            shared += 10
        worker.unlock()
        worker.sync_params()
        for array, before in zip(mine, expected):
            np.testing.assert_array_equal(array, before + 10)
        """,
    )
    experiment.finish(process)
    experiment.finish(controller)


def test_the_rules_of_the_core(experiment: Any) -> None:
    """Any rule of `multiverso.rules`: EASGD gives what Platoon's own gives, ASGD adds up exactly."""
    experiment.write(
        core_worker="""
        import numpy as np
        import multiverso as mv
        from platoon import PlatoonError, Worker
        worker = Worker()
        rank = worker.local_rank
        mine = [np.full((3, 4), 1.0), np.zeros(5, np.float32)]
        worker.init_shared_params(mine, mv.rules.asgd())
        for _ in range(50):
            for array in mine:
                array += 1
            worker.sync_params()
        worker.all_reduce(np.zeros(1))
        worker.copy_to_local()
        assert (mine[0] == 151).all() and (worker.shared_params[1] == 150).all()
        worker.all_reduce(np.zeros(1))

        mine[0][...] = 0
        worker.init_shared_params(mine[:1], mv.rules.easgd(0.25))
        worker.all_reduce(np.zeros(1))
        for turn in range(3):
            if turn == rank:
                mine[0] += 4
                worker.sync_params()
            worker.all_reduce(np.zeros(1))
        centre = 0.0
        for _ in range(3):
            centre += 0.25 * (4 - centre)
        np.testing.assert_allclose(worker.shared_params[0], centre)
        worker.all_reduce(np.zeros(1))
        try:
            worker.init_shared_params([np.zeros(3, np.int64)], mv.rules.easgd(0.25))
        except PlatoonError as error:
            print(error)
        """
    )
    said = experiment.train("core", 3)
    assert all("parameter 0 cannot be shared by the rule easgd" in text for text in said)


def test_what_keeps_a_table_from_being_made_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError("no room for it")

    monkeypatch.setattr(sharing, "ArrayTableHandler", refuses)
    with pytest.raises(OutOfMemoryError, match=r"^no room for it$"):
        sharing.SharedParameters(None, None, [np.zeros(3)], EASGD(0.5))  # type: ignore[arg-type]
