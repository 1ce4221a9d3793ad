"""Kills all processes of a run in the middle and starts it again: it goes on where it was saved.

    python examples/resuming/kill_and_resume.py with_torch.py

Takes with_torch.py, with_lightning.py, with_huggingface.py, with_keras.py or with_jax.py, each a complete program.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def start(script, folder, workers):
    """Starts the workers; returns the launcher."""
    launcher = [sys.executable, "-m", "multiverso.cli", "run", "-n", str(workers)]
    program = [str(Path(__file__).parent / script), "--directory", folder]
    return subprocess.Popen([*launcher, *program], stdout=subprocess.PIPE, text=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", nargs="?", default="with_torch.py")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        job = start(options.script, folder, options.workers)
        processes, trained = [job.pid], 0
        for line in job.stdout:
            print(line, end="", flush=True)
            processes += map(int, re.findall(r"is process (\d+)", line))
            trained += "epoch 2 begins" in line  # so epoch 1 has been saved
            if trained == 1:
                for process in processes:
                    os.kill(process, signal.SIGKILL)
                break
        job.stdout.close()
        job.wait()
        print(f"killed {len(processes)} processes", flush=True)

        with start(options.script, folder, options.workers) as job:
            for line in job.stdout:
                print(line, end="", flush=True)
        return job.returncode


if __name__ == "__main__":
    sys.exit(main())
