"""What Platoon costs, each figure beside the machine's own limit in the same run; prints one JSON object a line.

    python benchmarks/platoon_bench.py [control minibatches reduce meet steps alpha]

Real processes, started by the launcher. `alpha` trains the text example and takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

SEEDS = int(os.environ.get("PLATOON_BENCH_SEEDS", "1"))
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "platoon"


def launch(workers: int, worker: str, controller: str | None, *arguments: str) -> list[dict[str, Any]]:
    """Runs an experiment and returns what its workers and controller printed as JSON, the workers in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_worker.py").write_text(textwrap.dedent(worker))
        if controller is not None:
            (Path(folder) / "bench_controller.py").write_text(textwrap.dedent(controller))
        command = [sys.executable, "-m", "platoon.launcher", "bench", "-D", *["cpu"] * workers, *arguments]
        done = subprocess.run(
            command,
            cwd=folder,
            timeout=900,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{done.stderr}")
        said = [file.read_text() for file in sorted(Path(folder).glob("PLATOON_LOGS/*/*/*.out"))]
    return [json.loads(line) for text in said for line in text.splitlines() if line.startswith("{")]


def tell(name: str, **figures: Any) -> None:
    """Prints one result."""
    print(json.dumps({"benchmark": f"platoon {name}", "cores": os.cpu_count(), **figures}), flush=True)


CONTROLLER = """
    import json, sys, threading, time
    from platoon.channel import Controller

    class Bench(Controller):
        requests = 0

        def handle_control(self, req, worker_id, req_info):
            if req == "begin":
                self.used, self.since = time.process_time(), time.monotonic()
                self.requests = 0
            elif req == "end":
                seconds = time.monotonic() - self.since
                share = (time.process_time() - self.used) / seconds
                print(json.dumps({"core_share": share, "per_second": self.requests / seconds}), flush=True)
            else:
                self.requests += 1
            return req_info

    args = Controller.default_parser().parse_args()
    sys.exit(Bench(**Controller.default_arguments(args)).serve())
"""


def control() -> None:
    """The controller's share of a core at 50 requests a second, and how many it answers when asked to."""
    paced = """
        import threading, time
        from platoon import Worker
        worker = Worker()
        worker.send_req("begin")
        start = time.monotonic()
        for i in range(500):
            worker.send_req("next", {"i": i})
            threading.Event().wait(max(0, start + (i + 1) / 50 - time.monotonic()))
        worker.send_req("end")
    """
    result = launch(1, paced, CONTROLLER)[0]
    tell(
        "control, 50 requests a second", core_share_percent=100 * result["core_share"], per_second=result["per_second"]
    )
    busy = """
        import numpy as np, os
        from platoon import Worker
        worker = Worker()
        worker.all_reduce(np.ones(1))
        if worker.local_rank == 0:
            worker.send_req("begin")
        worker.all_reduce(np.ones(1))
        for i in range(5000):
            worker.send_req("next", i)
        worker.all_reduce(np.ones(1))
        if worker.local_rank == 0:
            worker.send_req("end")
    """
    for workers in (1, 2, 4):
        result = launch(workers, busy, CONTROLLER)[0]
        tell("control, as many as it can", workers=workers, requests_per_second=result["per_second"])


def minibatches() -> None:
    """Megabytes a second of 1 MB minibatches, beside copying them within a process."""
    dealer = """
        import sys, threading
        import numpy as np
        from platoon.channel import Controller
        args = Controller.default_parser().parse_args()
        controller = Controller(**{**Controller.default_arguments(args), "data_port": 0})
        batch = [np.random.default_rng(0).standard_normal((250, 500))]

        def deal():
            for _ in range(3000):
                controller.send_mb(batch)
            controller.end_mb()

        threading.Thread(target=deal, daemon=True).start()
        sys.exit(controller.serve())
    """
    taker = """
        import json, time
        import numpy as np
        from platoon import Worker
        worker = Worker()
        worker.init_mb_sock()
        got = worker.recv_mb()[0]
        start, n = time.monotonic(), 0
        while batch := worker.recv_mb():
            n += 1
        seconds = time.monotonic() - start
        target = np.empty_like(got)
        begin = time.monotonic()
        for _ in range(2000):
            np.copyto(target, got)
        copy = got.nbytes * 2000 / (time.monotonic() - begin) / 1e6
        print(json.dumps({"n": n, "mb_per_second": n * got.nbytes / seconds / 1e6, "copyto_mb_per_second": copy}))
    """
    for workers in (1, 2):
        results = launch(workers, taker, dealer)
        tell(
            "minibatches of 1 MB",
            workers=workers,
            mb_per_second=sum(result["mb_per_second"] for result in results),
            copyto_mb_per_second=statistics.median(result["copyto_mb_per_second"] for result in results),
        )


def reduce() -> None:
    """all_reduce(sum) of float32, in place, in turns with gloo's over the same workers."""
    worker = """
        import json, statistics, sys, time
        import numpy as np
        import torch, torch.distributed
        from platoon import Worker
        torch.set_num_threads(1)
        worker = Worker()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{sys.argv[1]}", rank=worker.local_rank, world_size=worker.local_size
        )
        for elements in (1000, 100_000, 1_000_000, 10_000_000):
            mine = np.ones(elements, np.float32)
            tensor = torch.ones(elements)
            times = {"platoon": [], "gloo": []}
            rounds = max(1, min(100, 3_000_000 // elements))
            for turn in range(9):
                for name, call in (
                    ("platoon", lambda: worker.all_reduce(mine, "sum", mine)),
                    ("gloo", lambda: torch.distributed.all_reduce(tensor)),
                ):
                    mine[:], tensor[:] = 1e-20, 1e-20
                    call()
                    begin = time.perf_counter()
                    for _ in range(rounds):
                        call()
                    times[name].append((time.perf_counter() - begin) / rounds * 1e3)
            if worker.local_rank == 0:
                print(json.dumps({"elements": elements, **{k: statistics.median(v) for k, v in times.items()}}))
        torch.distributed.destroy_process_group()
    """
    for workers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            for result in launch(workers, worker, None, f"-w={folder}/meet"):
                tell(
                    "all_reduce(sum) of float32",
                    workers=workers,
                    elements=result["elements"],
                    milliseconds=result["platoon"],
                    gloo_milliseconds=result["gloo"],
                    times_gloo=result["gloo"] / result["platoon"],
                )


def meet() -> None:
    """sync_params of one array of float32, beside copying it."""
    script = """
        import json, statistics, sys, time
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import ASGD, EASGD
        worker = Worker()
        elements = int(sys.argv[1])
        mine, other = np.ones(elements, np.float32), np.empty(elements, np.float32)
        rounds = max(20, min(2000, 20_000_000 // elements))

        def median(call):
            times = []
            call()
            worker.all_reduce(np.ones(1))
            for _ in range(7):
                begin = time.perf_counter()
                for _ in range(rounds):
                    call()
                times.append((time.perf_counter() - begin) / rounds * 1e3)
            return statistics.median(times)

        result = {"elements": elements, "copyto": median(lambda: np.copyto(other, mine))}
        for rule in (EASGD(0.5), ASGD()):
            worker.init_shared_params([mine], rule)
            name = type(rule).__name__
            result[name] = median(worker.sync_params)
            result[name + " without lock"] = median(lambda: worker.sync_params(synchronous=False))
        if worker.local_rank == 0:
            print(json.dumps(result))
    """
    for workers in (1, 2, 4):
        for elements in (1000, 1_000_000):
            tell("sync_params, milliseconds", workers=workers, **launch(workers, script, None, f"-w={elements}")[0])


def steps() -> None:
    """Steps a second with 50 ms of slept compute and EASGD of 464,154 float32 every 10 steps."""
    script = """
        import json, sys, threading, time
        import numpy as np
        compute = threading.Event()
        mine = [np.zeros(464_154, np.float32)]
        if sys.argv[1] == "alone":
            meet = everyone = lambda: None
        else:
            from platoon import Worker
            from platoon.param_sync import EASGD
            worker = Worker()
            worker.init_shared_params(mine, EASGD(0.9 / worker.local_size))
            meet = worker.sync_params
            everyone = lambda: worker.all_reduce(np.ones(1))
            meet()
        everyone()
        begin = time.perf_counter()
        for step in range(1, 201):
            compute.wait(0.05)
            if step % 10 == 0:
                meet()
        seconds = time.perf_counter() - begin
        everyone()
        print(json.dumps({"per_second": 200 / seconds}))
    """
    alone = launch(1, script, None, "-w=alone")[0]["per_second"]
    for workers in (1, 2, 4):
        together = sum(result["per_second"] for result in launch(workers, script, None, "-w=platoon"))
        tell("steps of 50 ms, EASGD every 10", workers=workers, times_alone=together / alone, per_second=together)


def alpha() -> None:
    """Error of the text example after equal work, for several alphas and numbers of workers."""
    for workers in (2, 4):
        for value in (0.05, 0.225, 0.45, 0.9):
            errors = []
            for seed in range(SEEDS):
                with tempfile.TemporaryDirectory() as folder:
                    shutil.copytree(EXAMPLES, f"{folder}/platoon", ignore=shutil.ignore_patterns("PLATOON_LOGS"))
                    command = [sys.executable, "-m", "platoon.launcher", "lstm", "-D", *["cpu"] * workers]
                    command += ["-c=--max-mb 1200 --valid-freq 200 --patience 99"]
                    command += [f"-w=--alpha {value} --seed {seed} --most 3000"]
                    where = f"{folder}/platoon/lstm"
                    subprocess.run(command, cwd=where, check=True, timeout=900, capture_output=True)
                    text = next(Path(where).glob("PLATOON_LOGS/*/*/controller.out")).read_text()
                    last = dict(part.split("=") for part in text.splitlines()[-1].split())
                    errors.append((float(last["best_valid_error"]), float(last["test_error"]), float(last["seconds"])))
            tell(
                "alpha of EASGD, LSTM on docstrings, 1200 minibatches",
                workers=workers,
                alpha=round(value, 3),
                valid_error=statistics.mean(e[0] for e in errors),
                test_error=statistics.mean(e[1] for e in errors),
                seconds=statistics.mean(e[2] for e in errors),
            )


ALL = {f.__name__: f for f in (control, minibatches, reduce, meet, steps, alpha)}


def main() -> None:
    """Runs the benchmarks that are named, or all but `alpha`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(ALL)}")
    for name in parser.parse_args().names or [name for name in ALL if name != "alpha"]:
        begin = time.monotonic()
        ALL[name]()
        print(f"# {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
