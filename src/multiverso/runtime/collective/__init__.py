"""What all workers do together, on sessions: reductions, agreements, locks."""
