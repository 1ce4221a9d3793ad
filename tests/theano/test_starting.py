"""Starting with MPI's launcher, and the choice of a GPU before the framework is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiverso.theano.framework import framework

# The original documents' way, with the name that Theano 1.0 gives its devices.
CHOOSE = """\
import os
import sys
import warnings

warnings.simplefilter("ignore")
import multiverso as mv

mv.init()
worker_id = mv.worker_id()
if "THEANO_FLAGS" not in os.environ:
    os.environ["THEANO_FLAGS"] = "floatX=float32,cxx=,base_compiledir={folder},device=cuda%d" % worker_id
os.environ["PYTENSOR_FLAGS"] = "floatX=float32,cxx="
os.environ["CUDA_VISIBLE_DEVICES"] = str(worker_id)
assert not {{"theano", "pytensor", "torch", "jax", "keras"}} & sys.modules.keys()
import {framework} as theano

device = theano.config.device if "{framework}" == "theano" else "cuda" + os.environ["CUDA_VISIBLE_DEVICES"]
sys.stdout.write("%d %s %s\\n" % (worker_id, device, theano.config.floatX))
mv.barrier()
mv.shutdown()
"""


@pytest.mark.timeout(300)
def test_each_worker_gets_its_gpu_before_the_import(tmp_path: Path) -> None:
    workers = 3
    script = tmp_path / "choose.py"
    script.write_text(CHOOSE.format(framework=framework().__name__, folder=tmp_path))
    environment = {k: v for k, v in os.environ.items() if k not in ("THEANO_FLAGS", "CUDA_VISIBLE_DEVICES")}
    mpiexec = Path(sys.executable).parent / "mpiexec"
    result = subprocess.run(
        [mpiexec, "-n", str(workers), sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")[:-1]) == [f"{i} cuda{i} float32" for i in range(workers)]


def test_a_binding_without_its_framework_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules.update(theano=None, pytensor=None)\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('theano', 'pytensor') else find(name, *rest)\n"
        "import multiverso.theano"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert "pip install 'multiverso[theano]'" in result.stderr


def test_the_original_module_paths_are_the_same_objects() -> None:
    from multiverso import theano
    from multiverso.theano_ext import sharedvar

    for name in sharedvar.__all__:
        assert getattr(sharedvar, name) is getattr(theano, name)
