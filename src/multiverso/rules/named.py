"""Rules by their names."""

from __future__ import annotations

from typing import Any, Literal, get_args

from multiverso.rules.asgd import asgd
from multiverso.rules.averaging import local_sgd, model_averaging
from multiverso.rules.downpour import downpour
from multiverso.rules.easgd import easgd
from multiverso.rules.rule import Rule

RuleName = Literal["asgd", "easgd", "downpour", "model_averaging", "local_sgd", "diloco"]
_BY_DEFAULT = {
    "asgd": asgd,
    "downpour": downpour,
    "model_averaging": model_averaging,
    "local_sgd": local_sgd,
    "diloco": local_sgd,
}


def rule_of(rule: Rule | RuleName | None, workers: int) -> Rule:
    """Returns what ``rule=`` means: a rule itself, one by its name with its defaults, or ASGD for None.

    ``"easgd"`` takes the moving rate of its paper, 0.9 divided by the number of workers.

    Raises:
        ValueError: no rule has this name.
        TypeError: neither a rule nor a name.
    """
    if rule is None:
        return asgd()
    if isinstance(rule, Rule):
        return rule
    if rule == "easgd":
        return easgd(0.9 / workers)
    if isinstance(rule, str):
        if rule not in _BY_DEFAULT:
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(get_args(RuleName))}")
        return _BY_DEFAULT[rule]()
    raise TypeError(f'rule= takes a rule such as multiverso.rules.easgd(0.2), or its name, "easgd"; got {_words(rule)}')


def _words(rule: Any) -> str:
    name = getattr(rule, "__name__", "")
    return f"the function {name} itself: call it" if name in _BY_DEFAULT or name == "easgd" else repr(rule)
