"""The examples of resuming: one is killed whole and goes on; test_framework_examples.py runs the others."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from warm import Warm

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "resuming"
SCRIPTS = ["with_lightning.py", "with_huggingface.py", "with_keras.py", "with_jax.py"]


def test_all_processes_are_killed_and_the_run_goes_on(tmp_path: Path, warm_torch: Warm) -> None:
    program = [str(FOLDER / "kill_and_resume.py"), "with_torch.py"]
    result = warm_torch.run_whole(tmp_path, *program, cwd=ROOT, env=os.environ)
    assert result.returncode == 0, result.stdout + result.stderr
    before, after = result.stdout.split("killed 3 processes\n")
    assert "epoch 2 begins" in before
    assert "goes on after" not in before
    for worker in range(2):
        assert re.search(rf"worker {worker} goes on after epoch [123]\n", after)
    assert re.search(r"epochs=3 accuracy=0\.[89]", after)


@pytest.mark.parametrize("script", [*SCRIPTS, "with_torch.py"])
def test_they_read_alike(script: str) -> None:
    text = (FOLDER / script).read_text()
    assert "saved at the end of each epoch: started again, it goes on after the last one." in text
    assert f"multiverso run -n 2 examples/resuming/{script} --directory saved" in text
