"""AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019 (arXiv 1711.05101), algorithm 2.

As PyTorch writes it, the decay is multiplied by the learning rate, and comes before Adam's step. A number that gets no
gradient, as a row that no batch names, keeps its moments and its count, and does not decay: the lazy form.
"""

from __future__ import annotations

from dataclasses import replace

from multiverso.checks import not_negative
from multiverso.updaters.adam import adam
from multiverso.updaters.decayed import decayed
from multiverso.updaters.updater import Updater


def adamw(
    learning_rate: float = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Updater:
    """Returns Adam's step after ``values -= learning_rate weight_decay values``; deltas are gradients.

    Args:
        learning_rate: above 0.
        beta_1, beta_2: decay of the first and the second moment, from 0, less than 1.
        epsilon: above 0.
        weight_decay: 0 or more.
    """
    step = adam(learning_rate, beta_1, beta_2, epsilon)
    return replace(decayed(step, not_negative(weight_decay, "weight decay")), name="adamw")
