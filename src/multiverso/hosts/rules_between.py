"""Rules between hosts (``between=``): what a home makes of the differences that the hosts push to it.

A host is a worker of the other hosts, so the rules are those between workers, one level up; H is the number of hosts::

    sum         T += a                                     every host's adds count in full
    mean        T += a / H                                 model averaging; with ``every``, local SGD
    diloco      T += lr a / H for each push; and once all hosts have pushed since the last time, g being the
                sum of these a / H: m = mu m + g;  T += lr mu m      outer Nesterov

Local SGD: Stich 2018, arXiv:1805.09767. DiLoCo: Douillard et al. 2023, arXiv:2311.08105, algorithm 1, with the outer
step of Nesterov momentum, ``lr (g + mu m)``. Nobody waits for the slowest host here: a push counts when it comes, and
only the momentum waits for all, as "delayed Nesterov" does in Liu et al. 2024, arXiv:2401.09135. One push of each host
moves T as one synchronous outer step does. ``shared_values.py`` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multiverso.errors import DtypeMismatchError, StartupError

NAMES = ("sum", "mean", "local_sgd", "diloco")


@dataclass(frozen=True)
class RuleBetween:
    """A rule between hosts.

    Attributes:
        name: one of NAMES.
        lr: the outer learning rate.
        momentum: of the outer Nesterov.
    """

    name: str = "sum"
    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def of(cls, text: str, dtype: npt.DTypeLike) -> RuleBetween:
        """Returns the rule that a user's text means: a name, or ``"diloco:LR,MOMENTUM"`` (by default 0.7 and 0.9).

        Raises:
            StartupError: there is no such rule.
            DtypeMismatchError: a table of whole numbers can only be summed.
        """
        name, colon, numbers = text.partition(":")
        lr, momentum = (0.7, 0.9) if name == "diloco" else (1.0, 0.0)
        try:
            if colon:
                lr, momentum = map(float, numbers.split(","))
        except ValueError:
            lr = -1.0
        if name not in NAMES or (colon and name != "diloco") or not (lr > 0 and 0 <= momentum < 1):
            raise StartupError(
                f"a rule between hosts is one of {', '.join(NAMES)}, or diloco:LR,MOMENTUM; got {text!r}"
            )
        if name != "sum" and np.dtype(dtype).kind != "f":
            raise DtypeMismatchError(
                f"the rule {name} needs a table of floats; {np.dtype(dtype)} can only be summed"
            )
        return cls(name, lr, momentum)
