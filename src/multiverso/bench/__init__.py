"""How fast the tables are on this machine, as ratios to what the same loop costs in private memory."""

from __future__ import annotations

from multiverso.bench.suite import FULL, QUICK, Plan, measure, render

__all__ = ["FULL", "QUICK", "Plan", "measure", "render"]
