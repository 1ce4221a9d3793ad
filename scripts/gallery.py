"""Runs the gallery's programs, with one process and with two, and notes what they print in docs/results/gallery.json.

python scripts/gallery.py [NAME ...] [--legacy PYTHON]

Those of Theano and Keras 1 need the environment of the tests with Theano (--legacy). scripts/pictures.py draws what
is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "results" / "gallery.json"
SECONDS = 400.0  # Theano compiles for minutes where it has never run

NEW = {f"{framework}/{name}.py": "" for framework in ("torch", "keras", "jax") for name in
       ("logistic_regression", "cnn", "resnet")} | {"theano/logistic_regression.py": ""}  # fmt: skip
OLD = {
    "theano/cnn.py": "",
    "theano/lasagne/Deep_Residual_Learning_CIFAR-10.py": "--blocks 1 --epochs 10",
    "theano/keras/addition_rnn_mv.py": "",
}
RESUMED = tuple(f"resuming/with_{name}.py" for name in ("torch", "jax", "keras"))
PLATOON = ("platoon/lstm", "platoon/synchronous_lstm")


def said(command: list[str], cwd: str, **more: str) -> str:
    """What a program prints on standard output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """All that a pattern finds."""
    return [float(found) for found in re.findall(pattern, text)]


def trained(python: str, name: str, arguments: str) -> dict[str, Any]:
    """Validation accuracy after each epoch, or at the end where that is all that is printed."""
    noted: dict[str, Any] = {"arguments": arguments}
    keras = {"KERAS_BACKEND": "theano" if name in OLD else "torch"}
    for workers in (1, 2):
        start = [python, "-m", "multiverso.cli", "run", "-n", str(workers), str(ROOT / "examples" / name)]
        with tempfile.TemporaryDirectory() as folder:
            text = said([*start, *arguments.split()], folder, **keras)
        after_each = numbers(r"(?:validation accuracy|val_accuracy:) ([\d.]+)", text)
        # Keras validates before the last exchange, so that its last figure is replaced by the one after it.
        noted[str(workers)] = after_each[:-1] + numbers(r"accuracy=([\d.]+)", text)
    return noted


def resumed(name: str) -> dict[str, Any]:
    """Accuracy at the end of a run, and of one that is killed in the middle and started again."""
    script = ROOT / "examples" / name
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, "-m", "multiverso.cli", "run", "-n", "2", str(script), "--directory", "saved"]
        undisturbed = numbers(r"accuracy=([\d.]+)", said(whole, folder, KERAS_BACKEND="torch"))
        again = [sys.executable, str(script.with_name("kill_and_resume.py")), script.name]
        text = said(again, folder, KERAS_BACKEND="torch")
    killed = [int(number) for number in re.findall(r"killed (\d+) processes", text)]
    return {"undisturbed": undisturbed, "killed and resumed": numbers(r"accuracy=([\d.]+)", text), "killed": killed}


def platoon(name: str) -> dict[str, Any]:
    """The share of validation texts that are classified wrong, each time that the controller asks."""
    short = "-c=--max-mb 1500 --valid-freq 100" if name.endswith("/lstm") else "-c=--epochs 10"
    noted: dict[str, Any] = {"arguments": short}
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "examples" / "platoon", folder, dirs_exist_ok=True)
            inside = str(Path(folder, Path(name).name))
            said([sys.executable, "-m", "platoon.launcher", "lstm", "-D", *["cpu"] * workers, short], inside)
            (log,) = Path(inside).glob("PLATOON_LOGS/lstm/*/controller*.out")
            text = log.read_text()
        noted[str(workers)] = numbers(r"valid error ([\d.]+)", text)
        noted[f"at {workers}"] = numbers(r"(?:after|epoch) (\d+)", text)
    return noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a program under examples/; all by default")
    parser.add_argument("--legacy", default=str(ROOT / ".venv-legacy" / "bin" / "python"), help="a Python with Theano")
    options = parser.parse_args()
    every = [*NEW, *OLD, *RESUMED, *PLATOON]
    if unknown := set(options.names) - set(every):
        parser.error(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    for name in options.names or every:
        if name in NEW | OLD:
            result = trained(options.legacy if name in OLD else sys.executable, name, (NEW | OLD)[name])
        else:
            result = resumed(name) if name in RESUMED else platoon(name)
        noted = json.loads(OUT.read_text()) if OUT.exists() else {}
        noted[name] = {"date": date.today().isoformat(), **result}
        lines = (f" {json.dumps(key)}: {json.dumps(noted[key])}" for key in sorted(noted))
        OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(name, result, flush=True)


if __name__ == "__main__":
    main()
