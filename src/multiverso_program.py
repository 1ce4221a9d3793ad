"""Where the programs `multiverso` and `platoon-launcher` begin.

A module of its own, outside of the packages: importing those takes a tenth of a second and more, in which Ctrl-C would
show a traceback of their imports. Until a program has something to end, Ctrl-C ends it here and now, with 128 + 2.
"""

from __future__ import annotations

# what is built in: the module `signal` with its enumerations takes ten times as long as all of this
import _signal  # type: ignore[import-not-found]
import os
import sys


def multiverso() -> None:
    """Runs the command line of multiverso."""
    _signal.signal(_signal.SIGINT, _leave)
    from multiverso.cli import main

    main()


def platoon_launcher() -> int:
    """Runs platoon's launcher; returns its exit code."""
    _signal.signal(_signal.SIGINT, _leave)
    try:
        from platoon.launcher import main
    except ImportError as error:
        import platoon

        print(
            f"platoon-launcher: the package platoon in {platoon.__path__[0]} is not the one of multiverso ({error}): "
            "PyPI has another project of that name, installed over it. `pip uninstall platoon`, then install "
            "multiverso again: `pip install --force-reinstall --no-deps` and what you gave pip then; or use one "
            "environment for each",
            file=sys.stderr,
        )
        return 2
    return main()


def _leave(number: int, frame: object) -> None:
    os._exit(128 + number)
