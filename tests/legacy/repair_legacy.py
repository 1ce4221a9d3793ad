"""Repair the installed Theano 1.0.5 and Keras 1.2.2 for CPython 3.11, NumPy 1.23.5 and SciPy 1.9.3.

Run once with the environment's own Python. Edits text in site-packages and adds one file, without importing
what it repairs; a second run changes nothing, and a text that should be there and is not ends it with an
error.
"""

import importlib.util
import re
import sys
from pathlib import Path


def package_root(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed here: pip install -r tests/legacy/requirements.txt")
    return Path(spec.origin).parent


THEANO_EDITS = [
    # NumPy 1.23's wheels record no blas_opt_info.
    (
        "configdefaults.py",
        "np.distutils.__config__.blas_opt_info",
        "getattr(np.distutils.__config__, 'blas_opt_info', {})",
    ),
    # Scan's loop in C came from Cython 0.28, which CPython 3.11 cannot compile: without it Scan uses its
    # Python loop.
    (
        "scan_module/scan_op.py",
        "from . import scan_perform_ext\n",
        "raise ImportError('scan_perform.c predates CPython 3.11')\n",
    ),
    # Indexing by a list of slices left NumPy in 1.23 (pooling without a compiler).
    (
        "tensor/signal/pool.py",
        "yk[[region_slices[i][r[i]] for i in xrange(nd)]]",
        "yk[tuple([region_slices[i][r[i]] for i in xrange(nd)])]",
    ),
    # Modules that became private in SciPy 1.8 (convolution without a compiler).
    ("tensor/nnet/conv.py", "scipy.signal.signaltools", "scipy.signal._signaltools"),
    ("tensor/nnet/conv.py", "scipy.signal.sigtools", "scipy.signal._sigtools"),
    ("tensor/nnet/abstract_conv.py", "scipy.signal.signaltools", "scipy.signal._signaltools"),
    ("tensor/nnet/abstract_conv.py", "scipy.signal.sigtools", "scipy.signal._sigtools"),
]

# Left Theano in 1.0; Lasagne 0.1 imports it.
DOWNSAMPLE = """\
from theano.tensor.signal.pool import Pool as DownsampleFactorMax  # noqa
from theano.tensor.signal.pool import pool_2d as max_pool_2d  # noqa
"""


def repair_theano(root: Path) -> None:
    for name, old, new in THEANO_EDITS:
        path = root / name
        text = path.read_text(encoding="utf-8")
        if old in text:
            path.write_text(text.replace(old, new), encoding="utf-8")
            print("edited", path)
        elif new not in text:
            sys.exit(f"{path}: neither {old!r} nor its replacement is there")
    path = root / "tensor" / "signal" / "downsample.py"
    if not path.exists():
        path.write_text(DOWNSAMPLE, encoding="utf-8")
        print("added", path)


def repair_keras(root: Path) -> None:
    """Names that left collections (Python 3.10) and inspect (3.11), and an import that is left to others."""
    for path in sorted(root.rglob("*.py")):
        old = text = path.read_text(encoding="utf-8")
        text = re.sub(r"from collections import (Iterable|Mapping|Callable)\b", r"from collections.abc import \1", text)
        text = re.sub(r"\bcollections\.(Iterable|Mapping|Callable)\b", r'__import__("collections.abc").abc.\1', text)
        text = re.sub(r"\binspect\.getargspec\b", "inspect.getfullargspec", text)
        if path.name == "theano_backend.py" and "import theano.ifelse" not in text:
            text = text.replace("import theano\n", "import theano\nimport theano.ifelse\n", 1)
        if text != old:
            path.write_text(text, encoding="utf-8")
            print("edited", path)


if __name__ == "__main__":
    repair_theano(package_root("theano"))
    repair_keras(package_root("keras"))
