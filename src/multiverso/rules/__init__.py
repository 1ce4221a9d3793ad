"""What a worker does with its parameters and the shared ones: ASGD, DC-ASGD, EASGD, Downpour, averaging, local SGD.

A rule is a value, given wherever something is shared (``rule=`` of every binding), or straight to
`share`, which is all that the bindings call::

    local = np.zeros(1000, "float32")                        # this worker's parameters, flat
    shared = mv.rules.share(local, mv.rules.easgd(0.2))      # collective; local takes the common value
    for batch in batches:
        local -= rate * gradient(local, batch)
        shared.exchange(local)                               # one step of the rule, in place

``share(local, rule=None, *, name=None, initial="master", session=None, master=False) -> Shared``, where no
rule means ASGD; a ``Shared`` has ``exchange(local, *, timeout_seconds=None)``, ``exchange_async(local) ->
Pending``, ``restart(local)`` and ``table``, the centre. ``local`` is always a flat, contiguous, writable
float32 or float64 array of the same size and dtype; it need not be the same array each time.

A rule of your own is a `Rule` of two small loops; see the how-to page "Choose a rule".
"""

from __future__ import annotations

from multiverso.rules.additive import asgd, dcasgd, dcasgd_adaptive, downpour
from multiverso.rules.averaging import diloco, easgd, local_sgd, model_averaging
from multiverso.rules.rule import Rule
from multiverso.rules.shared import RuleName, Shared, rule_of, share

__all__ = [
    "Rule",
    "RuleName",
    "Shared",
    "asgd",
    "dcasgd",
    "dcasgd_adaptive",
    "diloco",
    "downpour",
    "easgd",
    "local_sgd",
    "model_averaging",
    "rule_of",
    "share",
]
