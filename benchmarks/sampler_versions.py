"""Seconds until a vLLM sampler has a trainer's next version: a publication, and a safetensors file in /dev/shm.

    make vllm                                                                     # installs vLLM for CPUs
    .venv-vllm/bin/python benchmarks/sampler_versions.py --out results.json       # some minutes

The trainer is a process of its own with a random Llama of two layers in float32, another for each version. Both ways
begin when it has the version's weights in its memory and end when the sampler would answer with them: publish and
Follower.update; save_file into /dev/shm and vLLM's own reload_weights, which is what it has for CPUs. In turns: each
version goes first by one way, then by the other, and the order changes. After each the sampler's greedy tokens have to
be those of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import tiny_llama

WAYS = ("publication", "file")
SIZES = {"small": (128, 512, 512), "larger": (1024, 2816, 8192)}  # hidden, intermediate, vocabulary


def trainer(name: str, folder: str, size: str) -> None:
    """Hands out the step that it is asked for, by the way that it is asked for, and says when it began."""
    from safetensors.torch import save_file

    import multiverso as mv

    with mv.Publication(name, like=tiny_llama.model(0, *SIZES[size])) as publication:
        print("ready", flush=True)
        for line in sys.stdin:
            step, way = line.split()
            model = tiny_llama.model(int(step), *SIZES[size])
            began = time.monotonic()
            if way == "publication":
                publication.publish(model, step=int(step), wait_seconds=60)
            else:
                save_file(model.state_dict(), f"{folder}/new")
                os.replace(f"{folder}/new", f"{folder}/model.safetensors")
            print(began, flush=True)


def measure(size: str, versions: int, folder: str) -> dict[str, Any]:
    """Returns the seconds of each way, and how many versions' tokens were transformers'."""
    from multiverso.vllm import Follower

    first = tiny_llama.model(0, *SIZES[size])
    first.save_pretrained(folder)
    llm = tiny_llama.sampler(folder)
    name = f"sampler-versions-{os.getpid()}"
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    equal = dict.fromkeys(WAYS, 0)
    command = [sys.executable, __file__, "--trainer", name, folder, size]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with Follower(llm, name) as follower:
            for step in range(1, versions + 1):
                answer = tiny_llama.greedy(tiny_llama.model(step, *SIZES[size]))
                for way in WAYS if step % 2 else WAYS[::-1]:
                    process.stdin.write(f"{step} {way}\n")
                    process.stdin.flush()
                    began = float(process.stdout.readline())
                    if way == "publication":
                        follower.update(follower.version)
                    else:
                        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                        llm.reset_prefix_cache()
                        follower.version = -1
                    seconds[way].append(time.monotonic() - began)
                    equal[way] += tiny_llama.tokens(llm)[0] == answer
        process.stdin.close()
    ratios = [a / b for a, b in zip(*(seconds[way] for way in WAYS), strict=True)]
    return {
        "size": size,
        "mb": sum(value.numel() * 4 for value in first.state_dict().values()) / 1e6,
        "versions": versions,
        "tokens_equal": equal,
        "median_seconds": {way: statistics.median(seconds[way]) for way in WAYS},
        "median_ratio": statistics.median(ratios),
        "seconds": seconds,
    }


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100, help="of the small model; of the larger one, a fifth")
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=list(SIZES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        trainer(*options.trainer)
        return
    if options.size:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            print(json.dumps(measure(options.size, options.versions, folder)))
        return
    results = []
    for size, versions in (("small", options.versions), ("larger", options.versions // 5)):
        command = [sys.executable, __file__, "--size", size, "--versions", str(versions)]  # vLLM: once a process
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        said = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.append(json.loads(said.splitlines()[-1]))
    told = {
        "command": "benchmarks/sampler_versions.py",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "results": results,
    }
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps([{key: value for key, value in each.items() if key != "seconds"} for each in results], indent=1))


if __name__ == "__main__":
    main()
