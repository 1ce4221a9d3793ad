"""Memory that is kept for values on their way to a GPU: what it does where none can be pinned, as here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from multiverso.torch.tables import Staging

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here, which test_cuda.py goes through")
def test_where_nothing_can_be_pinned_other_memory_does_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    staging = Staging()
    got = staging.bring(lambda array: array.fill(3), 5, np.dtype("float32"), CPU)
    assert got.tolist() == [3.0] * 5
    assert "could be pinned" in capfd.readouterr().err
    taken: list[list[float]] = []
    staging.send(torch.ones(2, dtype=torch.float16), np.dtype("float32"), lambda array: taken.append(array.tolist()))
    assert taken == [[1.0, 1.0]]
    assert capfd.readouterr().err == ""  # smaller: the same memory


def test_a_read_that_raises_leaves_it_usable() -> None:
    staging = Staging()

    def fail(array: np.ndarray[Any, Any]) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        staging.bring(fail, 4, np.dtype("int64"), CPU)
    assert staging.bring(lambda array: array.fill(1), 4, np.dtype("int64"), CPU).tolist() == [1] * 4
