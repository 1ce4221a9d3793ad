"""The tables against the machine's limit and against gloo's all_reduce, in one run: prints JSON.

python benchmarks/tables.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from multiverso.bench import FULL, QUICK, measure, render
from multiverso.launch import run
from reporting import give_report


def gloo(sizes: list[int], elements_a_size: int, rank_file: str) -> list[dict[str, Any]]:
    """One rank: microseconds of an all_reduce, with PyTorch's gloo, on one thread as the tables are."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["MULTIVERSO_WORKER_ID"]), int(os.environ["MULTIVERSO_WORKERS_NUM"])
    dist.init_process_group("gloo", init_method=f"file://{rank_file}", rank=rank, world_size=size)
    rows = []
    for elements in sizes:
        tensor = torch.ones(elements)
        times = max(6, min(500, elements_a_size // elements))
        dist.all_reduce(tensor)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor)
        rows.append({"elements": elements, "microseconds": (time.perf_counter() - began) / times * 1e6})
    dist.destroy_process_group()
    return rows


def against_gloo(sizes: list[int], numbers: list[int], repeats: int, elements_a_size: int) -> list[dict[str, Any]]:
    """Rounds and all_reduce in turn, so that a disturbance hits both; medians over the repeats."""
    from multiverso.bench import workers

    rows = []
    for number in numbers:
        ours: dict[int, list[float]] = {size: [] for size in sizes}
        theirs: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(repeats):
            for one in zip(*run(workers.rounds, number, (sizes, elements_a_size)), strict=True):
                if one[0]["operation"] == "round (exchange)":
                    ours[one[0]["elements"]].append(statistics.mean(row["microseconds"] for row in one))
            with tempfile.TemporaryDirectory() as folder:
                result = run(gloo, number, (sizes, elements_a_size, f"{folder}/rendezvous"))
            for one in zip(*result, strict=True):
                theirs[one[0]["elements"]].append(statistics.mean(row["microseconds"] for row in one))
        for size in sizes:
            round_, reduce = statistics.median(ours[size]), statistics.median(theirs[size])
            rows.append(
                {
                    "workers": number,
                    "elements": size,
                    "round_microseconds": round_,
                    "gloo_all_reduce_microseconds": reduce,
                    "gloo_over_round": reduce / round_,
                    "runs": {"round": ours[size], "gloo": theirs[size]},
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--output", type=Path, help="write the JSON there, too")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    say = partial(print, file=sys.stderr)
    result = measure(plan, lambda what: say(f"measuring: {what} ..."))
    say("measuring: rounds against gloo ...")
    sizes = [size for size in plan.sizes if size <= 10_000_000]
    numbers = [number for number in plan.workers if number > 1]
    result["gloo"] = against_gloo(sizes, numbers, plan.repeats, plan.elements_a_size)
    say(render(result))
    for row in result["gloo"]:
        say(
            f"{row['workers']} workers, {row['elements']:,}: round {row['round_microseconds']:,.0f} us, "
            f"gloo {row['gloo_all_reduce_microseconds']:,.0f} us, {row['gloo_over_round']:.2f}x"
        )
    give_report(result, options.output)


if __name__ == "__main__":
    main()
