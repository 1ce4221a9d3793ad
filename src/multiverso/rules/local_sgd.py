"""Local SGD with an outer Nesterov step (DiLoCo): Douillard et al. 2023, arXiv 2311.08105, algorithm 1."""

from __future__ import annotations

from dataclasses import replace

from multiverso.rules.averaging import difference_to_centre, take_centre
from multiverso.rules.rule import Rule
from multiverso.updaters.nesterov import nesterov


def local_sgd(outer_lr: float = 0.7, outer_momentum: float = 0.9) -> Rule:
    """Returns local SGD: train alone for many steps, then one outer step along the mean change of all.

    ``d = mean(local - centre); v = momentum v + d; centre += lr (d + momentum v); local = centre``. The inner
    optimiser is the worker's own and keeps its state (AdamW in the paper). With ``outer_lr=1,
    outer_momentum=0`` it is model averaging. Defined for synchronous mode alone, as in the paper. Exchange
    rarely: every 10 steps or many more.

    Args:
        outer_lr: above 0.
        outer_momentum: from 0, less than 1.
    """
    updater = replace(nesterov(outer_lr, outer_momentum), mean=True)
    return Rule("local sgd", difference_to_centre, take_centre, updater=updater, modes=("sync",))


diloco = local_sgd
