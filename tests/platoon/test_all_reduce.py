"""All workers reduce arrays together: every operation, dtype, size and layout, errors and deaths."""

from __future__ import annotations

import re
from typing import Any

import pytest

# Compares each result with a loop in rank order; what each worker contributes is known to all.
REDUCE = """
    import hashlib, sys
    import ml_dtypes
    import numpy as np
    from platoon import Worker
    from multiverso.runtime.collective.reducer import working_dtype

    worker = Worker()
    size, rank = worker.local_size, worker.local_rank
    digest = hashlib.sha256()
    loops = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum, "average": np.add}
    number = 0

    def contribution(rank, elements, dtype):
        # a block, again and again: its length divides that of no part, and random numbers take longer than all else
        block = np.random.default_rng(1000 * elements + rank).standard_normal(min(elements, 99_991)) * 3
        if dtype.kind in "iu":
            block = np.round(block * 5)
            if dtype.kind == "u":
                block = np.abs(block)
        return np.resize(block.astype(dtype), elements)

    def expected(op, arrays, dtype):
        working = working_dtype(dtype)
        result = arrays[0].astype(working)
        for array in arrays[1:]:
            result = loops[op](result, array.astype(working))
        if op == "average":
            result = result // size if working.kind == "i" else result / working.type(size)
        return result.astype(dtype)

    def same(one, other):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == other.tobytes(), (op, dtype, elements, one.ravel()[:5], other.ravel()[:5])

    names = sys.argv[1].split(",")
    for name in names:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        for elements in map(int, sys.argv[2].split(",")):
            arrays = [contribution(other, elements, dtype) for other in range(size)]
            mine = arrays[rank]
            for op in sys.argv[3].split(","):
                wanted = expected(op, arrays, dtype)
                result = worker.all_reduce(mine, op)
                same(result, wanted)
                digest.update(result.tobytes())
                inplace = mine.copy()
                assert worker.all_reduce(inplace, op, inplace) is None
                same(inplace, wanted)
                if 6 <= elements < 2_000_000:  # what is larger has more chunks of the same kind
                    shape = (elements // 6, 2, 3)
                    for there in (lambda a: np.asfortranarray(a), lambda a: np.repeat(a, 2, 0)[::2], lambda a:
                    a[::-1]):
                        source = there(mine[: elements // 6 * 6].reshape(shape))
                        target = np.empty_like(source)[::-1]
                        worker.all_reduce(source, op, target)
                        parts = [there(a[: elements // 6 * 6].reshape(shape)) for a in arrays]
                        same(target, expected(op, parts, dtype))
                number += 1
    print(number, digest.hexdigest())
"""
ALL = "float32,float64,float16,bfloat16,int32,int64"
OPERATIONS = "sum,product,max,min,average"


def reduce_in(experiment: Any, workers: int, dtypes: str, sizes: str, operations: str = OPERATIONS) -> str:
    experiment.write(reduce_worker=REDUCE)
    outputs = experiment.train("reduce", workers, dtypes, sizes, operations)
    assert len(outputs) == workers
    assert len(set(outputs)) == 1, outputs
    combinations = len(dtypes.split(",")) * len(sizes.split(",")) * len(operations.split(","))
    assert outputs[0].startswith(f"{combinations} ")
    return str(outputs[0])


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_operation_dtype_size_and_layout(experiment: Any, workers: int) -> None:
    reduce_in(experiment, workers, ALL, "1,2,7,64,1000,8192,8193,20001")


def test_many_chunks_and_the_same_bits_again(experiment: Any) -> None:
    first = reduce_in(experiment, 2, "float32,float16,int64", "300007,1000003", "sum,max")
    assert reduce_in(experiment, 2, "float32,float16,int64", "300007,1000003", "sum,max") == first


def test_three_million(experiment: Any) -> None:
    reduce_in(experiment, 4, "float32", "3000000", "sum")


def test_other_dtypes(experiment: Any) -> None:
    reduce_in(experiment, 2, "int8,uint8,int16,uint16,uint32", "5,9000", "sum,max,min")


def test_what_cannot_be_reduced_is_refused_before_anything_happens(experiment: Any) -> None:
    experiment.write(
        bad_worker="""
        import numpy as np
        from platoon import Worker
        worker = Worker()
        array = np.ones(3)
        for arguments in (
            (array, "median"),
            (array.astype(complex),),
            (np.array(["a"]),),
            (array, "sum", np.ones(4)),
            (array, "sum", np.ones(3, np.float32)),
            (array, "sum", [1, 2, 3]),
        ):
            try:
                worker.all_reduce(*arguments)
            except Exception as error:
                print(type(error).__name__, error)
            else:
                raise AssertionError(arguments)
        locked = np.ones(3)
        locked.flags.writeable = False
        try:
            worker.all_reduce(array, "+", locked)
        except ValueError as error:
            print(error)
        # and it still works
        assert (worker.all_reduce([1, 2, 3], "+") == [2, 4, 6]).all()
        """
    )
    said = experiment.train("bad", 2)
    for words in ("'median'", "complex128", "<U1", "got (4,)", "float32", "got list", "writable"):
        assert words in said[0], words


@pytest.mark.parametrize("mine", ["np.ones(3 + rank)", "np.ones(3, 'f4' if rank else 'f8')", "np.ones(9000 + rank)"])
def test_workers_that_call_with_different_things_all_get_an_error(experiment: Any, mine: str) -> None:
    experiment.write(
        differ_worker=f"""
        import numpy as np
        from platoon import Worker
        from multiverso.errors import ShapeMismatchError, WorkerLostError
        worker = Worker()
        rank = worker.local_rank
        for kind in (ShapeMismatchError, WorkerLostError):
            try:
                worker.all_reduce({mine})
            except kind as error:
                print(error)
            else:
                raise AssertionError("not refused")
        """
    )
    said = experiment.train("differ", 3)
    assert all("do not call all_reduce with the same things" in text for text in said)


@pytest.mark.parametrize("elements", [10, 3_000_000])
def test_a_worker_that_is_killed_in_it_hinders_nobody(experiment: Any, port: int, elements: int) -> None:
    """By hand, so that nobody ends the survivors: each has an error that names the dead, and none hangs."""
    experiment.write(
        controller="""
        import sys
        from platoon.channel import Controller
        controller = Controller(control_port=int(sys.argv[1]), devices=["cpu"] * 3)
        print("serving", flush=True)
        sys.exit(controller.serve())
        """,
        worker=f"""
        import os, signal, sys, threading
        import numpy as np
        from platoon import Worker
        from multiverso.errors import WorkerLostError
        worker = Worker(control_port=int(sys.argv[1]))
        mine = np.ones({elements}, np.float32)
        worker.all_reduce(mine)
        try:
            if worker.local_rank == 1:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                worker.all_reduce(mine)
        except WorkerLostError as error:
            print(error, error.worker_ids)
        try:
            worker.all_reduce(mine)
        except WorkerLostError as error:
            print(error)
        """,
    )
    controller = experiment.start("controller.py", str(port))
    controller.stdout.readline()
    workers = [experiment.start("worker.py", str(port)) for _ in range(3)]
    said = [experiment.finish(worker, None) for worker in workers]
    assert sorted(worker.returncode for worker in workers) == [-9, 0, 0], said
    for text in (text for text in said if text):
        assert re.search(r"worker 1 \(pid \d+\) died", text)
        assert "(1,)" in text
        assert "nothing more can be reduced" in text
    assert "ended without Worker.close()" in experiment.finish(controller)


def test_shared_arrays(experiment: Any) -> None:
    experiment.write(
        shared_worker="""
        import numpy as np
        from platoon import Worker
        worker = Worker()
        mine = worker.shared(np.empty((4, 5), np.float32))
        assert mine.shape == (4, 5) and (mine == 0).all()
        assert worker.shared(np.empty((4, 5), np.float32)) is mine
        worker.all_reduce(np.zeros(1))
        mine[worker.local_rank] = worker.local_rank + 1
        worker.all_reduce(np.zeros(1))
        assert mine[:2].tolist() == [[1] * 5, [2] * 5]
        assert list(worker.shared_arrays) == [80]
        assert worker.shared(np.empty((7, 3), np.float64, order="F")).flags.f_contiguous
        """
    )
    experiment.train("shared", 2)


def test_a_worker_that_left_in_order_is_named(experiment: Any) -> None:
    """It closed regularly while another one still reduces: who it was, and no word of deaths or of other launchers."""
    experiment.write(
        left_worker="""
        import numpy as np
        from multiverso.errors import WorkerLostError
        from platoon import Worker
        worker = Worker()
        worker.all_reduce(np.ones(1))
        if worker.local_rank == 1:
            worker.close()
        else:
            try:
                worker.all_reduce(np.ones(1))
            except WorkerLostError as error:
                print(error)
        """
    )
    said, _ = experiment.train("left", 2)
    assert re.search(r"worker 1 \(pid \d+\) left in order while .* waited for all_reduce\(sum\)", said), said
    assert "multiverso run" not in said
