"""Share a host's cores and GPUs out between workers, before any framework is imported."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from multiverso.errors import StartupError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def thread_environ(environ: Mapping[str, str], cores_num: int, workers_num: int) -> dict[str, str]:
    """Chooses OMP_NUM_THREADS when the user did not: without it each worker starts a thread per core."""
    if "OMP_NUM_THREADS" in environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores_num // workers_num))}


def bound_environ(cores_num: int) -> dict[str, str]:
    """Gives every thread pool as many threads as the worker has cores."""
    return dict.fromkeys(_THREAD_VARIABLES, str(cores_num))


def available_cores() -> list[int]:
    """Lists the cores that this process may use, hyper-threads of one core side by side."""
    return sorted(os.sched_getaffinity(0), key=_topology)


def split_cores(cores: Sequence[int], workers_num: int) -> list[tuple[int, ...]]:
    """Splits the cores into one run for each worker, equal to within one; if there are too few, workers share them.

    Args:
        cores: the cores, in the order in which neighbours belong together.
        workers_num: how many parts, at least 1.
    """
    if workers_num > len(cores):
        return [(cores[worker % len(cores)],) for worker in range(workers_num)]
    bounds = [worker * len(cores) // workers_num for worker in range(workers_num + 1)]
    return [tuple(cores[low:high]) for low, high in pairwise(bounds)]


def choose_gpus(wish: str, environ: Mapping[str, str]) -> list[str]:
    """Reads `--gpus`: which devices there are to share out, as values of CUDA_VISIBLE_DEVICES.

    Args:
        wish: "auto" for all that are visible, or a list such as "0,1". As for any CUDA program, a number
            counts within CUDA_VISIBLE_DEVICES where that is set.
        environ: the launcher's environment.

    Raises:
        StartupError: no GPU is found, or a number is not among the visible ones, or the list cannot be read.
    """
    known = visible_gpus(environ)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if wish == "auto":
        if not known:
            where = "no NVIDIA device was found" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
            raise StartupError(f"--gpus auto: {where}; leave the option out to run without GPUs.")
        return known
    chosen = [name.strip() for name in wish.split(",")]
    if not all(re.fullmatch(r"\d+|GPU-[\w-]+|MIG-[\w/-]+", name) for name in chosen):
        raise StartupError(f"--gpus {wish!r}: expected 'auto' or a list of device numbers such as '0,1'.")
    for name in chosen:
        if name.isdecimal() and int(name) >= len(known):
            there = "that were found here" if visible is None else f"of CUDA_VISIBLE_DEVICES={visible}"
            raise StartupError(
                f"--gpus {wish}: there is no device {name} among the {len(known)} {there}. If it exists and "
                "was not found, name it in CUDA_VISIBLE_DEVICES."
            )
    return [known[int(name)] if name.isdecimal() else name for name in chosen]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Lists the GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them: those in it, or all.

    Without the variable they are what the kernel driver shows, or else `nvidia-smi` (under WSL).
    """
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() and name.strip() != "-1"]
    # In a container the numbers in /dev are the host's; CUDA counts what it sees from 0.
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    count = len(devices)
    if not count and (program := shutil.which("nvidia-smi")):
        try:
            answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
            count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
        except (OSError, subprocess.TimeoutExpired):
            count = 0
    return [str(number) for number in range(count)]


def _topology(core: int) -> tuple[int, int, int]:
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((folder / "physical_package_id").read_text())
        return package, int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core
