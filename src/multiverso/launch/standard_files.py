"""A launcher may itself be started with its standard files closed (``>&-``, some daemons)."""

import os
import sys


def open_standard_files() -> None:
    """Puts /dev/null in the place of those that are closed: else the next file to be opened would stand for them."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            file = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115  # as long as the process
            setattr(sys, name, file)
