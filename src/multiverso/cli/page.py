"""`multiverso page`: the page of a job that runs, or of a file; or a file for somebody else."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from multiverso.errors import StartupError
from multiverso.files.opening import write_whole
from multiverso.page.address import address_of, check_installed, new_file, new_listener, new_token
from multiverso.watching.jobs import Status, chosen, find_jobs


def show_page(wish: str | None, history: Path | None, export: Path | None, port: int) -> int:
    """Serves the page until Ctrl-C, or writes it; returns the exit code.

    Raises:
        StartupError: there is no such job, or more than one; the port is taken; a file cannot be read or written.
    """
    path = Path(wish) if wish is not None and wish.endswith(".jsonl") else None
    if export is not None:
        return _write(path, export)
    check_installed()
    job = _the_one(find_jobs(), wish) if path is None else None
    from multiverso.page.feed import Feed, follow_job, read_file
    from multiverso.page.server import Server

    with ExitStack() as stack:
        listener = stack.enter_context(new_listener(port))
        feed = Feed(None if history is None else stack.enter_context(new_file(history)))
        if path is not None:
            read_file(path, feed.add)
        token = new_token()
        server = Server(feed, token)

        async def serve() -> None:
            following = None if job is None else asyncio.create_task(follow_job(feed, job["address"]))
            await server.serve([listener])
            if following is not None:
                following.cancel()

        click.echo(f"{address_of(listener, token)}    (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            asyncio.run(serve())
    return 0


def _write(path: Path | None, export: Path) -> int:
    from multiverso.page.feed import Feed, read_file

    if path is None:
        raise StartupError("--export makes one HTML file of a job's past: give the .jsonl file that has it.")
    feed = Feed()
    read_file(path, feed.add)
    write_whole(export, feed.saved().encode())
    click.echo(f"{export} shows the job in any browser.")
    return 0


def _the_one(jobs: list[Status], wish: str | None) -> Status:
    found = chosen(jobs, wish)
    if len(found) == 1:
        return found[0]
    running = "".join(
        f"\n  {job['address']}  {', '.join(sorted({worker['program'] for worker in job['workers']}))}"
        for job in found or jobs
    )
    if found:
        raise StartupError(
            f"{len(found)} jobs of this user are meant; name one, by its script, a worker's pid or a part of its "
            f"address:{running}"
        )
    if not jobs:
        raise StartupError("no job of this user is running here; `multiverso page run.jsonl` shows one that is over.")
    raise StartupError(f"no running job is called {wish}; there are:{running}")
