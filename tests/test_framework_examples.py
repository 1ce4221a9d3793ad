"""The examples of PyTorch, Keras 3 and JAX train, as one process and as two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = str(Path(sys.executable).parent / "multiverso")
FRAMEWORKS = ("torch", "keras", "jax")
# Epochs, and the accuracy that they reach in any case. After 4 some runs of cnn.py are still below 0.7, as its workers
# happen to meet; after 10, as many as the example does, the lowest of 20 was 0.95.
SCRIPTS = {"logistic_regression.py": (4, 0.8), "cnn.py": (10, 0.7), "resnet.py": (4, 0.5)}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


ONE_AFTER_ANOTHER = """
import runpy, sys
folder, *scripts = sys.argv[1:]
sys.path.insert(0, folder)
for script, epochs in map(str.split, scripts):
    sys.argv = [script, "--epochs", epochs]
    runpy.run_path(f"{folder}/{script}", run_name="__main__")
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_workers_learn_the_digits(framework: str, tmp_path: Path) -> None:
    """One job after another in the same two processes, which import the framework once."""
    job = tmp_path / "job.py"
    job.write_text(ONE_AFTER_ANOTHER)
    scripts = [f"{script} {epochs}" for script, (epochs, _) in SCRIPTS.items()]
    result = run(LAUNCHER, "run", "-n", "2", str(job), str(ROOT / "examples" / framework), *scripts)
    assert result.returncode == 0, result.stdout + result.stderr
    reached = [float(found) for found in re.findall(r"workers=2 accuracy=([\d.]+)", result.stdout)]
    assert len(reached) == len(SCRIPTS), result.stdout
    assert all(accuracy > least for accuracy, (_, least) in zip(reached, SCRIPTS.values(), strict=True)), (
        reached
    )


def unmarked(path: Path) -> str:
    """The program without its marked lines, and with what they took the place of."""
    lines: list[str] = []
    was = ""
    for line in path.read_text().splitlines():
        if was:  # it stands in the place of what was there
            lines.append(was)
            was = ""
        elif line.lstrip().startswith("# multiverso, was: "):
            was = line.replace("# multiverso, was: ", "")
        elif not line.endswith("# multiverso"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_their_marked_lines_they_are_programs_for_one_process(framework: str, tmp_path: Path) -> None:
    folder = ROOT / "examples" / framework
    (tmp_path / "load_data.py").write_text((folder / "load_data.py").read_text())
    for script in SCRIPTS:
        source = unmarked(folder / script)
        assert "multiverso" not in source.split('"""', 2)[2]
        (tmp_path / script).write_text(source)
    result = run(
        sys.executable, "-c", ONE_AFTER_ANOTHER, str(tmp_path), *(f"{script} 1" for script in SCRIPTS)
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"workers=1 accuracy=0\.\d+", result.stdout)) == len(SCRIPTS)


def test_missing_files_are_named_and_the_examples_read_alike(tmp_path: Path) -> None:
    result = run(sys.executable, "examples/torch/cnn.py", "--data", str(tmp_path))
    assert result.returncode == 1
    assert "missing data_batch_1, data_batch_2" in result.stderr
    readers = {(ROOT / "examples" / framework / "load_data.py").read_text() for framework in FRAMEWORKS}
    assert len(readers) == 1
