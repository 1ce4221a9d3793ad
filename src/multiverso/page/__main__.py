"""The page of a launcher's job, in a process beside it: started by `launch.watched`, ended by it.

Argument: the descriptor of the listening socket. Standard input, a socket: the page's token as a line, then the
descriptor of the file to write (or an empty line), then snapshots. Its end is this process's end, once all who listen
have the last one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import ExitStack

from multiverso.page.feed import Feed, follow_lines
from multiverso.page.server import Server

_LONGEST = 64 * 1024 * 1024


async def _main(listener: socket.socket) -> None:
    reader, _ = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0)), limit=_LONGEST)
    token = (await reader.readline()).decode().strip()
    descriptor = (await reader.readline()).decode().strip()
    with ExitStack() as stack:
        file = stack.enter_context(open(int(descriptor), "wb")) if descriptor else None
        feed = Feed(file)
        server = Server(feed, token)
        serving = asyncio.create_task(server.serve([listener]))
        following = asyncio.create_task(follow_lines(feed, reader))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        following.cancel()


if __name__ == "__main__":
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
