"""Collective operations of sessions: reductions, agreements, locks."""
