"""Whether PyTorch is there, and what differs between its versions. The only module that knows."""

from __future__ import annotations

from importlib.util import find_spec

MISSING = 'multiverso.torch needs PyTorch 2.2 or newer: pip install "multiverso[torch]"'

if find_spec("torch") is None:
    raise ImportError(MISSING, name="torch")
