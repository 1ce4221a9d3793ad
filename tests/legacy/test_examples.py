"""The original examples' commands, at a small size, over the real Theano, Lasagne and Keras."""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import lasagne
import numpy as np
import pytest
import theano

from frameworks import PROGRAMS
from warm import Warm

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "theano"
RESNET = "lasagne/Deep_Residual_Learning_CIFAR-10.py"
pytestmark = pytest.mark.timeout(300)  # the first one compiles kernels
SMALL = {
    "logistic_regression.py": ["--epochs", "6"],
    "cnn.py": ["--epochs", "2", "--images", "96", "--width", "4"],
    RESNET: ["--epochs", "1", "--images", "32", "--blocks", "1", "--batch-size", "16"],
    "keras/addition_rnn_mv.py": ["--epochs", "2", "--examples", "400", "--hidden", "8"],
}


def mpirun(workers: int, name: str, *options: str) -> list[str]:
    command = [Path(sys.executable).parent / "mpirun", "-np", str(workers), sys.executable]
    result = subprocess.run(
        [*command, f"./examples/theano/{name}", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Has imported what takes two seconds of a processor in each process of an example."""
    modules = ("theano.tensor", "lasagne", "keras.models", "keras.layers", "sklearn.datasets")
    # importing mpi4py, as Theano does where it is installed, starts MPI: nothing to fork with
    with Warm(*modules, *PROGRAMS, without=("mpi4py",)) as made:
        yield made


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", FOLDER / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_process(text: str) -> str:
    """What the example's header says: without the marked lines, and with those that they replaced."""
    lines: list[str] = []
    replaced = None
    for line in text.splitlines():
        marked = re.fullmatch(r"( *)# multiverso, was: (.*)", line)
        if marked:
            replaced = marked[1] + marked[2]
        elif replaced is not None:
            lines.append(replaced)
            replaced = None
        elif not line.endswith("  # multiverso"):
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def logistic(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The last line of four workers, and the model that they have saved."""
    saved = tmp_path_factory.mktemp("logistic") / "model.pkl"
    name = "logistic_regression.py"
    return mpirun(4, name, *SMALL[name], "--save", str(saved))[-1], saved


def test_the_documented_command(logistic: tuple[str, Path]) -> None:
    last, _ = logistic
    measured = re.fullmatch(r"workers=4 accuracy=(0\.\d{4}|1\.0000)", last)
    assert measured is not None, last
    assert float(measured[1]) > 0.9


@pytest.mark.parametrize("name", [name for name in SMALL if name != "logistic_regression.py"])
def test_two_workers_train(name: str, warm: Warm) -> None:
    """Started by any launcher; the other test has the documented one."""
    script = f"./examples/theano/{name}"
    first, second = warm.run_job(2, script, *SMALL[name], cwd=ROOT, env=os.environ)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert re.fullmatch(r"workers=2 accuracy=(0\.\d{4}|1\.0000)", first.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SMALL)
def test_without_the_marked_lines_it_is_a_program_for_one_process(name: str, tmp_path: Path, warm: Warm) -> None:
    script = one_process((FOLDER / name).read_text())
    code = script.split('"""', 2)[2]
    assert "multiverso" not in code
    assert "mv." not in code
    if name in (RESNET, "cnn.py"):  # the others show that the marks are honoured; these take long
        compile(script, name, "exec")
        return
    (tmp_path / "load_data.py").write_text((FOLDER / "load_data.py").read_text())
    (tmp_path / "alone.py").write_text(script)
    done = warm.run(str(tmp_path / "alone.py"), *SMALL[name], cwd=ROOT, env=os.environ)
    assert done.stdout.splitlines()[-1].startswith("workers=1 accuracy="), done.stderr


def test_the_saved_model_loads_and_predicts(logistic: tuple[str, Path], warm: Warm) -> None:
    _, saved = logistic
    check = (
        "import sys, pickle, theano, numpy as np\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "import load_data, logistic_regression\n"
        "sys.modules['__main__'].LogisticRegression = logistic_regression.LogisticRegression\n"
        f"model = pickle.load(open({str(saved)!r}, 'rb'))\n"
        "_, _, x, y = load_data.load_digits()\n"
        "scores = x.reshape(len(x), -1) @ model.W.get_value() + model.b.get_value()\n"
        "print((scores.argmax(axis=1) == y).mean() > 0.9)"
    )
    done = warm.run("-c", check, cwd=ROOT, env=os.environ)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_the_residual_network_has_the_papers_size() -> None:
    network = load(RESNET).build_network(theano.tensor.tensor4("x"), 3, 32, 5)
    assert lasagne.layers.count_params(network, trainable=True) == 464_154
    assert lasagne.layers.count_params(network) == 466_426
    assert len(lasagne.layers.get_all_params(network)) == 157
    assert lasagne.layers.get_output_shape(network) == (None, 10)


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype("u1").tobytes()


def test_mnist_is_read_from_its_own_files(tmp_path: Path) -> None:
    images, labels = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256, np.array([3, 1, 2])
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte.gz"):
        (tmp_path / name).write_bytes(gzip.compress(idx(images)) if name.endswith("gz") else idx(images))
    for name in ("train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(idx(labels))
    x_train, y_train, x_test, y_test = load("load_data.py").load_mnist(tmp_path)
    for x, y in ((x_train, y_train), (x_test, y_test)):
        assert x.shape == (3, 1, 28, 28)
        assert x.dtype == np.float32
        np.testing.assert_allclose(x[:, 0] * 255, images, atol=1e-4)
        np.testing.assert_array_equal(y, labels)


def test_cifar10_is_read_from_its_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = np.full((2, 3072), index, "u1")
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": [index, 9]}))
    x, y, x_test, y_test = load("load_data.py").load_cifar10(tmp_path)
    assert x.shape == (10, 3, 32, 32)
    np.testing.assert_array_equal(y, [0, 9, 1, 9, 2, 9, 3, 9, 4, 9])
    np.testing.assert_allclose(x_test * 255, 5, atol=1e-4)
    np.testing.assert_array_equal(y_test, [5, 9])


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_missing_files_are_named(data: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"missing (data_batch_1, |train-images)") as refused:
        getattr(load("load_data.py"), f"load_{data}")(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "https://" in str(refused.value)


def test_no_folder_of_the_examples_shadows_a_library() -> None:
    assert not list((ROOT / "examples").rglob("__init__.py"))
