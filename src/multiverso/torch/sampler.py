"""Batches for a `DataLoader`, handed out to the workers on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from multiverso.runtime.session.current import current
from multiverso.tables.batches import deal


class BatchSampler(Sampler[list[int]]):  # type: ignore[misc]
    """The `batch_sampler` of a `DataLoader` whose batches are handed out to the workers on demand.

    Each pass over the loader is the next epoch of `multiverso.batches`, with its meaning, and the same
    arguments in all workers. It has no length: how many batches a worker gets is not known beforehand.

    Args:
        data: the data set, or its number of samples.
        batch_size: the most samples of a batch.
        seed: of the shuffle.
        ahead: with ``DataLoader(num_workers=w)``, ``w * prefetch_factor`` (2 by default): so many batches the loader
            asks for before it hands out the first. They count as unfinished, and are handed out again if this worker
            dies; but the end of an epoch then does not wait for other workers, so the batches that a worker had ahead
            when it died after that are missing from this epoch.

    Examples:
        >>> import multiverso as mv, multiverso.torch as mvt
        >>> from torch.utils.data import DataLoader
        >>> session = mv.init()
        >>> loader = DataLoader(range(5), batch_sampler=mvt.BatchSampler(5, 2))
        >>> sorted(int(x) for batch in loader for x in batch)
        [0, 1, 2, 3, 4]
        >>> mv.shutdown()
    """

    def __init__(self, data: Sized | int, batch_size: int, *, seed: int = 0, ahead: int = 0) -> None:
        self.n = data if isinstance(data, int) else len(data)
        self.batch_size = batch_size
        self.seed = seed
        self.ahead = ahead
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets which epoch the next pass is, as of a `DistributedSampler`; for a run that is resumed."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this worker's batches of the next epoch."""
        epoch, self._epoch = self._epoch, None
        for rows in deal(current(), self.n, self.batch_size, self.seed, epoch, ahead=self.ahead):
            yield rows.tolist()
