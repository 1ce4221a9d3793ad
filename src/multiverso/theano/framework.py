"""Which framework: Theano, or PyTensor, its successor with the same shared variables."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What is looked for first. A script that wants the other one has imported it before it makes a variable.
NAMES = ("theano", "pytensor")

MISSING = (
    "multiverso.theano needs PyTensor, or Theano 1.0.5: pip install 'multiverso[theano]' installs PyTensor, "
    "and docs/how-to/theano.md says how Theano itself is installed on a current Python"
)


def _name() -> str:
    """Returns which one the script uses, importing neither: the one it has imported, else the one that is installed."""
    imported = [name for name in NAMES if sys.modules.get(name) is not None]
    for name in imported or filter(find_spec, NAMES):
        return name
    raise ImportError(MISSING)


_name()


def framework() -> Any:
    """Returns the module that the script uses."""
    return importlib.import_module(_name())


def array_of(variable: Any) -> NDArray[Any]:
    """Returns a shared variable's value: its own memory where it lies in this process's, a copy elsewhere.

    Raises:
        TypeError: not a shared variable, or one whose value is not an array (a sparse matrix, say).
    """
    if not hasattr(variable, "get_value") or not hasattr(variable, "set_value"):
        raise TypeError(f"expected a shared variable of Theano or PyTensor, got {type(variable).__name__}")
    value = variable.get_value(borrow=True)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"the shared variable {variable} holds a {type(value).__name__}; expected an array")
    return value
