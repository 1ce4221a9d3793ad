"""Embeddings over shared tables: a forward pulls the rows of its batch, a backward pushes their gradients."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from multiverso.params.embedded import Table, check_trainable, look_up
from multiverso.torch.beside import beside


class _Rows(torch.nn.Module):  # type: ignore[misc]  # torch is seen as untyped
    """What both embeddings do: the different rows of a batch out of the table, and their gradients into it."""

    def __init__(self, table: Table, learning_rate: float, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding_dim = check_trainable(table, learning_rate)
        self.table = table
        self.learning_rate = learning_rate
        self.padding_idx = padding_idx
        self._fetch: tuple[Any, Future[Any]] | None = None  # the ids, and what fetches their rows

    def prefetch(self, ids: Any) -> None:
        """Begins to fetch the rows of a batch during training; the forward of the same ids takes them.

        The rows are as they were when they were fetched: what other workers, or this one's own next backward, push
        meanwhile is not in them. At most one batch is on its way.

        Args:
            ids: what the next forward will get.
        """
        self._join()
        self._fetch = ids, beside(partial(self._look_up, ids), "multiverso-prefetch")

    def _join(self) -> tuple[Any, Any]:
        """Waits for what was fetched; returns for which ids, and their rows and places."""
        fetch, self._fetch = self._fetch, None
        return (None, None) if fetch is None else (fetch[0], fetch[1].result())

    def _pulled(self, ids: Any) -> tuple[Any, Any]:
        """Returns the rows of the different ids, and for each id which of them is its."""
        asked, found = self._join()
        if asked is not None and (asked is ids or (asked.shape == ids.shape and torch.equal(asked, ids))):
            return found[0], found[1]
        return self._look_up(ids)

    def _look_up(self, ids: Any) -> tuple[Any, Any]:
        return look_up(self.table, ids, self.learning_rate, self.padding_idx)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.table!r}, learning_rate={self.learning_rate}"


class Embedding(_Rows):
    """A lookup of rows by id, as `torch.nn.Embedding` is, over a table that all workers share.

    A forward pulls each different row of the batch once; a backward gives their summed gradients to the table's
    updater, at once, and each forward's by itself: ids of one step belong into one call. The rows are no parameters: no
    optimizer sees them, a checkpoint of the module does not hold them (`table.save` does), and memory in this process
    is that of a batch.

    Args:
        table: a `KeyedTable` (any 64-bit ids, rows begin when they are trained) or a `MatrixTableHandler` (ids in
            0 .. num_row - 1), of floats, whose updater descends: ``"sgd"`` and the like.
        learning_rate: a factor of the gradients before they are pushed; for updaters that have their own
            learning rate leave it at 1.
        padding_idx: an id whose row reads as zeros and is never trained.

    Raises:
        TypeError, ValueError: no such table, or one whose updater adds gradients.

    Examples:
        >>> import multiverso as mv, torch
        >>> from multiverso.torch import Embedding
        >>> session = mv.init()
        >>> words = Embedding(mv.KeyedTable(4, initial="uniform", updater="sgd"), learning_rate=0.1)
        >>> words(torch.tensor([[3, 5], [3, -1]])).sum().backward()
        >>> len(words.table)
        3
        >>> mv.shutdown()
    """

    def __init__(self, table: Table, *, learning_rate: float = 1.0, padding_idx: int | None = None) -> None:
        super().__init__(table, learning_rate, padding_idx)

    def forward(self, ids: Any) -> Any:
        """Returns float rows of shape ids' + (embedding_dim,), on the ids' device.

        Args:
            ids: integers of any shape.
        """
        rows, places = self._pulled(ids)
        return torch.nn.functional.embedding(places, rows)


class EmbeddingBag(_Rows):
    """Sums, means or maxima of rows, as `torch.nn.EmbeddingBag` gives them, over a table that all workers share.

    Args:
        table, learning_rate, padding_idx: as for `Embedding`; rows of ``padding_idx`` do not count in a mean.
        mode: ``"mean"`` (default), ``"sum"`` or ``"max"``.
        include_last_offset: the last of ``offsets`` is the number of ids.

    Raises:
        TypeError, ValueError: as for `Embedding`, or a mode that is not one of these.
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: str = "mean",
        learning_rate: float = 1.0,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        if mode not in ("mean", "sum", "max"):
            raise ValueError(f"mode is 'mean', 'sum' or 'max'; got {mode!r}")
        super().__init__(table, learning_rate, padding_idx)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Returns one row a bag, of shape (bags, embedding_dim).

        Args:
            ids: integers of shape (bags, ids of a bag), or flat with ``offsets``.
            offsets: where each bag begins in flat ids.
            per_sample_weights: factors of ids' shape; with ``mode="sum"`` only.
        """
        rows, places = self._pulled(ids)
        padding = None
        if self.padding_idx is not None:
            at = (ids == self.padding_idx).nonzero()
            padding = int(places[tuple(at[0])]) if len(at) else None
        return torch.nn.functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
