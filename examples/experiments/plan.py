"""What is run: settings that all configurations share, and configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import multiverso as mv

ORIGINAL = ("0M-1G", "1M-1G-1S", "1M-4G-1S", "1M-4G-3S")
_CODE = re.compile(r"(?P<used>[01])M-(?P<workers>\d+)G(?:-(?P<every>\d+)S)?")
MODES: dict[str, dict[str, Any]] = {"async": {}, "sync": {"sync": True}, "bounded": {"staleness": 2}}


@dataclass(frozen=True)
class Settings:
    """What is the same in all configurations of an experiment."""

    dataset: str = "digits"
    folder: Path | None = None
    depth: int = 8
    width: int = 8
    batch: int = 32
    epochs: int = 20
    rate: float = 0.1
    drops: tuple[int, ...] = (10, 15)  # epochs from which the rate is a tenth
    momentum: float = 0.9
    decay: float = 1e-4
    seed: int = 1

    def rate_at(self, epoch: int) -> float:
        """Returns the learning rate of an epoch, from 0."""
        return self.rate * 0.1 ** sum(epoch >= drop for drop in self.drops)


CIFAR10 = Settings(dataset="cifar10", depth=32, width=16, batch=128, epochs=82, drops=(41, 61))


@dataclass(frozen=True)
class Configuration:
    """One way to run them: ``1M-4G-3S`` is with multiverso, 4 processes, an exchange every 3 minibatches."""

    used: bool
    workers: int
    every: int
    rule: str = "asgd"
    mode: str = "async"
    hosts: int = 1  # a rehearsal, where there are more: all of them this machine

    @property
    def code(self) -> str:
        """The name in tables and pictures."""
        if not self.used:
            return f"0M-{self.workers}G"
        more = [word for word in (self.rule, self.mode) if word not in ("asgd", "async")]
        more += [f"{self.hosts}H"] * (self.hosts > 1)
        return "-".join([f"1M-{self.workers}G-{self.every}S", *more])


def parse_configuration(text: str) -> Configuration:
    """Reads ``1M-4G-3S``, with ``,rule=easgd:0.2``, ``,mode=sync`` or ``,hosts=2`` behind it, where that is wanted."""
    code, *options = text.split(",")
    match = _CODE.fullmatch(code)
    if not match or (match["used"] == "1") != bool(match["every"]):
        raise SystemExit(f"a configuration is called 0M-1G, or 1M-4G-3S with any numbers; got {code!r}")
    made = Configuration(match["used"] == "1", int(match["workers"]), int(match["every"] or 1))
    if not made.used and made.workers != 1:
        raise SystemExit("without multiverso (0M) there is one process: 0M-1G")
    if made.workers < 1 or made.every < 1:
        raise SystemExit(f"{code}: processes and minibatches between exchanges are 1 or more")
    for option in options:
        name, _, value = option.partition("=")
        if name not in ("rule", "mode", "hosts"):
            raise SystemExit(f"{text!r}: a configuration has rule=, mode= and hosts=, and no {name!r}")
        if name == "hosts" and not (value.isdecimal() and 1 <= int(value) <= made.workers):
            raise SystemExit(f"{text!r}: hosts= is from 1 to the {made.workers} processes; got {value!r}")
        made = replace(made, **{name: int(value) if name == "hosts" else value})
    if made.mode not in MODES:
        raise SystemExit(f"mode= is {', '.join(MODES)}; got {made.mode!r}")
    rule = parse_rule(made.rule)
    if made.mode not in rule.modes:
        raise SystemExit(f"{text}: the rule {rule.name} is defined for mode={' or '.join(rule.modes)}")
    return made


def parse_rule(text: str) -> mv.rules.Rule:
    """Reads a rule: ``asgd``, ``easgd:ALPHA``, ``downpour:FETCH:PUSH``, ``averaging``, ``local_sgd:RATE:MOMENTUM``."""
    name, *values = text.split(":")
    try:
        match name, values:
            case "asgd", []:
                return mv.rules.asgd()
            case "easgd", [alpha]:
                return mv.rules.easgd(float(alpha))
            case "downpour", [fetch, push]:
                return mv.rules.downpour(fetch=int(fetch), push=int(push))
            case "averaging", []:
                return mv.rules.model_averaging()
            case "local_sgd", [rate, momentum]:
                return mv.rules.local_sgd(float(rate), float(momentum))
    except ValueError as error:
        raise SystemExit(f"rule {text!r}: {error}") from error
    raise SystemExit(
        f"no rule {text!r}: there are asgd, easgd:ALPHA, downpour:FETCH:PUSH, averaging, local_sgd:RATE:MOMENTUM"
    )
