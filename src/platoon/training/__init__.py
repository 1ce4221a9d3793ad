"""Rules of synchronous training, and the asynchronous ones under their other name."""
