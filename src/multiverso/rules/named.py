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
            more = f" ({rule!r} has no default: multiverso.rules.{rule}(rate))" if rule.startswith("dcasgd") else ""
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(get_args(RuleName))}{more}")
        return _BY_DEFAULT[rule]()
    raise TypeError(f'rule= takes a rule such as multiverso.rules.easgd(0.2), or its name, "easgd"; got {_words(rule)}')


def _words(rule: Any) -> str:
    module = getattr(rule, "__module__", "")
    if module.startswith("multiverso.rules") and callable(rule):
        return f"the function {rule.__name__} itself: call it"
    if module.startswith("multiverso.updaters"):
        return f"the updater {getattr(rule, 'name', rule)!r}, which updater= of a table takes"
    return repr(rule)
