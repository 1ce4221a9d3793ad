"""What the page starts in several ways: nothing is written, if it gets what it should."""

import sys

import multiverso as mv

with mv.init():
    assert mv.workers_num() == 4
    assert sys.argv[1:] == (["--epochs", "10"] if sys.argv[0] == "train.py" and len(sys.argv) > 1 else [])
