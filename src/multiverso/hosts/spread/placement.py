"""Which host a row lives on, its *home*, and which is its *backup*: by its key alone, the same on all hosts.

Keys fall into `GROUPS` groups, and each group lives on the host that has the highest weight for it (rendezvous hashing:
Thaler and Ravishankar, A name-based mapping scheme for rendezvous, 1996). So a host that comes or goes moves only
those groups that it gets or had.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multiverso.layout.keyed import GROUP_SHIFT, GROUPS

_ODD = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64


def groups_of(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Returns each key's group: bits of the hash by which tables find it, which they use for nothing else."""
    bits = _mixed(keys.view(np.uint64) + np.uint64(_ODD))
    bits >>= np.uint64(GROUP_SHIFT)
    bits &= np.uint64(GROUPS - 1)
    return bits.view(np.intp)


def homes_of(hosts: Sequence[int]) -> npt.NDArray[np.int16]:
    """Returns the host of each group, (GROUPS,), of these hosts' numbers."""
    return places_of(hosts, 1)[0]


def places_of(hosts: Sequence[int], copies: int) -> list[npt.NDArray[np.int16]]:
    """Returns the first hosts of each group, in their order: its home, and its backup if there are two."""
    weights = np.stack([_weights(host) for host in hosts])
    found = []
    for _ in range(min(copies, len(hosts))):
        best = weights.argmax(axis=0)
        weights[best, np.arange(GROUPS)] = 0
        found.append(np.asarray(hosts, np.int16)[best])
    return found


def _weights(host: int) -> npt.NDArray[np.uint64]:
    return _mixed(np.arange(GROUPS, dtype=np.uint64) + np.uint64((host + 1) * _ODD % (1 << 64)))


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mixes numbers, in place, as ``hash64`` of the kernels does."""
    for shift, multiplier in zip((30, 27), _MIX, strict=True):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(multiplier)
    bits ^= bits >> np.uint64(31)
    return bits
