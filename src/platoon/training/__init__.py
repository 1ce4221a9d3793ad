"""Rules of synchronous training (`global_dynamics`), and `param_sync` under its other name."""
