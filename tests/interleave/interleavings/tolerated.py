"""Mutants that no law can notice, because the line they spoil saves time and decides nothing; each with its reason."""

from __future__ import annotations

TOLERATED: dict[str, str] = {}
