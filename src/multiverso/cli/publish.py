"""``multiverso publish``: a safetensors file for all processes of the host that want it, once in memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def serve(path: str, name: str, say: Callable[[str], None]) -> int:
    """Publishes a file until the process is ended."""
    from multiverso.errors import StartupError
    from multiverso.publications import Publication
    from multiverso.publications.files import leaves_in

    leaves = leaves_in(path)
    try:
        made = Publication(name, like=leaves, slots=1)
    except ValueError as error:  # a name that is none, or no tensor
        raise StartupError(f"{path}: {error}") from error
    with made as publication:
        publication.publish(leaves, text=os.path.abspath(path)[:1000])
        size = sum(leaf.nbytes for leaf in {leaf.place: leaf for leaf in leaves.values()}.values())
        del leaves
        say(f"{path} is published as {name!r} ({size / 1e6:,.1f} MB): read it by multiverso.subscribe({name!r})")
        while True:
            signal.pause()
