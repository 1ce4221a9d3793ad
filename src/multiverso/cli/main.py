"""The command line: parse, call, print. A command's imports are made when it runs, so that help is quick."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from multiverso import __version__
from multiverso.cli.keys import COLUMNS

_SSH = "ssh -o BatchMode=yes"  # `launch.ssh.DEFAULT_SSH`, which is imported when it is used


class Commands(click.Group):
    """The commands; a script in the place of one is pointed out."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command."""
        is_command = self.get_command(ctx, args[0]) is not None
        if not is_command and Path(args[0]).is_file() and not ctx.resilient_parsing:  # as a shell's completion is
            ctx.fail(f"{args[0]} is a file, not a command; to start it: multiverso run -n 4 {args[0]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the exit code is what it returns. What a user can mend is said in a sentence."""
        try:
            code = super().invoke(ctx)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except Exception as error:
            words = _complaint(error)
            if words is None:
                raise
            click.echo(f"multiverso: {words}", err=True)
            code = 2
        raise click.exceptions.Exit(code or 0)


def _files(_: click.Context, __: click.Parameter, incomplete: str) -> list[Any]:
    """Complete names of files: the shell does it."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
)
@click.version_option(__version__, "--version", "-V", message="multiverso %(version)s", help="Print the version.")
@click.pass_context
def app(context: click.Context) -> None:
    """Shared model parameters for training processes."""
    if context.invoked_subcommand != "run":  # which has no use for a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)


@app.command(name="run", context_settings={"allow_interspersed_args": False})
@click.argument("target", shell_complete=_files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
@click.option("-n", "-np", "--workers", type=int, help="How many workers to start.", show_default="1")
@click.option("-m", "module", is_flag=True, help="Run the target as `python -m` does.")
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "continue"]),
    default="stop",
    help="When a worker fails: stop the others, or let them continue without it.",
)
@click.option("--gpus", help="'auto' or a list such as 0,1: worker i sees only the i-th of them.")
@click.option("--bind", is_flag=True, help="Divide the cores among the workers.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="Write each worker's output to worker-<i>.log in this folder, too.",
)
@click.option("--json", is_flag=True, help="Write one JSON object a line.")
@click.option(
    "--summary",
    "show_summary",
    is_flag=True,
    help="At the end, print what each worker did: operations, staleness, waits, mv.log.",
)
@click.option("--page", is_flag=True, help="Serve a page in the browser that shows the job while it runs.")
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --page: write the job's past to this file (.jsonl), which `multiverso page` shows later.",
)
@click.option(
    "--timeout", "timeout_seconds", type=float, help="End the job after this many seconds.", metavar="SECONDS"
)
@click.option(
    "--max-restarts",
    type=int,
    default=0,
    help="Restart a failed job, up to this many times, from its newest checkpoint, if it makes any "
    "(multiverso.checkpoint).",
)
@click.option(
    "--replace",
    type=int,
    default=0,
    help="With --on-failure continue: restart a failed worker in the same place, while the others continue; this "
    "many restarts in all (with --hosts, on each host, and as many lost hosts in all).",
)
@click.option("--resume", is_flag=True, help="Resume the newest checkpoint of an earlier run, if there is one.")
@click.option(
    "--hosts",
    help="Hosts' names with commas between them, reached by ssh; or a number: rehearse that many on this "
    "machine, each with a node and memory of its own. -n workers in all are spread over them evenly.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=29600,
    help="Where the first of several hosts listens for the others.",
)
@click.option("--ssh", default=_SSH, help="The command that reaches a host.")
@click.option("--insecure-fabric", is_flag=True, help="Do not encrypt between hosts, on a network you trust.")
@click.option(
    "--host-grace",
    type=float,
    default=30.0,
    help="Seconds of silence until a host counts as lost; shorter cuts do no harm.",
)
@click.option("--wire", help="How changes travel between hosts: native, float32, bfloat16, int8, topk or topk:F.")
@click.option("--every", help="How often a host sends its changes: a number of seconds, or a text such as '100 adds'.")
@click.option(
    "--between", help="How the hosts' changes are combined: sum, mean, local_sgd, diloco or diloco:LR,MOMENTUM."
)
@click.option(
    "--grace", "grace_seconds", type=float, default=1.0, help="Seconds that workers get to end before they are killed."
)
def run_command(
    show_summary: bool, insecure_fabric: bool, wire: str | None, every: str | None, between: str | None, **given: Any
) -> int:
    """Start a program in several workers of one job, on this host or, with --hosts, on several.

    Each line of output gets its worker's number. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on.
    OMP_NUM_THREADS is set to cores / workers where it is not set already.

    The exit code is 0 when all workers succeeded; otherwise the failed worker's (128 + n for a signal n).
    With --on-failure continue it is 0 when at least one worker succeeded. 124: timeout; 130: Ctrl-C; 2: not
    started, because of an invalid option. With --max-restarts it is the last start's; a signal or the
    timeout, which is for all starts together, ends the job for good.
    """
    from multiverso.launch.local import launch
    from multiverso.launch.options import RunOptions

    summary: Callable[[Any], str] | None = None
    if show_summary:
        from multiverso.cli import top as showing

        summary = showing.summary

    exchange = {"wire": wire, "every": every, "between": between}
    options = RunOptions(
        **given,
        summary=summary,
        encrypted=not insecure_fabric,
        exchange={name: text for name, text in exchange.items() if text is not None},
    )
    start = launch
    if options.hosts is not None:
        from multiverso.launch.hosts import launch_on_hosts as start
    return start(options)


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
@click.option(
    "--hosts", metavar="A,B", help="Test whether these hosts can run a job: versions, ports, clocks, encryption."
)
@click.option(
    "--ssh",
    metavar="COMMAND",
    default=_SSH,  # as `run` does: nobody could answer its questions there
    help="The command that reaches a host.",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=29600, help="Where the first host would listen for the others."
)
@click.option("--probe", type=int, hidden=True)
def doctor(as_json: bool, hosts: str | None, ssh: str, port: int, probe: int | None) -> int:
    """Test this machine, and say how to fix what fails.

    With --hosts, test whether these hosts can run a job. The exit code is 1 when something failed.
    """
    from multiverso.cli.doctor import examine
    from multiverso.cli.show import show_findings

    if probe is not None:
        from multiverso.cli.host_probe import probe as answer

        return answer(probe)
    if hosts is None:
        return show_findings(examine(), as_json)
    from multiverso.cli.host_doctor import VERDICTS, examine_hosts

    return show_findings(examine_hosts(hosts, ssh, port), as_json, VERDICTS)


@app.command()
@click.option("--once", is_flag=True, help="Show the jobs once and end.")
@click.option("--json", "as_json", is_flag=True, help="Write the jobs once as a JSON list.")
@click.option("--interval", type=float, default=1.0, help="Seconds between two updates.")
@click.option("--job", help="Only this one: its script's name, a worker's pid, or its address.")
@click.option(
    "--sort",
    type=click.Choice([*COLUMNS, "slow"]),
    default="worker",
    metavar="COLUMN",
    help="Sort the workers by this column; slow: first the one that the others wait for.",
)
def top(once: bool, as_json: bool, interval: float, job: str | None, sort: str) -> int:
    """Show the running jobs of this user, live: workers, what they wait for, tables.

    Keys: q (or Ctrl-C) ends it, s sorts the slowest first, P by processor time, M by memory, < and > by another column,
    / shows only workers that contain a text, h shows all keys.

    Of each worker: operations a second, now and over the last looks, how many pushes of others come between its reads
    (stale), how many operations it is behind the one that has done most (lag), how long it has waited, how long others
    have waited for it (cost), and its last values of mv.log.
    """
    from multiverso.cli.top import show_jobs

    return show_jobs(once=once, as_json=as_json, interval_seconds=interval, job=job, sort=sort)


@app.command()
@click.argument("job", required=False, shell_complete=_files)
@click.option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the job's past to this file (.jsonl), which `multiverso page` shows later.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one HTML file of a .jsonl file's job, and serve nothing.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="Where to serve.")
def page(job: str | None, history: Path | None, export: Path | None, port: int) -> int:
    """Serve a page in the browser that shows a job, on 127.0.0.1 only; its address has a token.

    JOB is its script's name, a worker's pid, a part of its address, or the .jsonl file of one that is over; without it,
    the one job that runs.
    """
    from multiverso.cli.page import show_page

    return show_page(job, history, export, port)


@app.command()
@click.option("--full", is_flag=True, help="All sizes and up to 4 workers: a few minutes.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def bench(full: bool, as_json: bool) -> None:
    """Measure the tables on this machine, beside the same loops on private memory in the same run."""
    import json

    from multiverso.bench import FULL, QUICK, measure, render

    result = measure(FULL if full else QUICK, lambda what: click.echo(f"measuring: {what} ...", err=True))
    click.echo(json.dumps(result) if as_json else render(result))


@app.command()
@click.argument("path")
@click.option(
    "--name", required=True, help="The name under which processes of this user find it: multiverso.subscribe(NAME)."
)
def publish(path: str, name: str) -> int:
    """Share a safetensors file with all processes of this host that read it, in one copy, until Ctrl-C."""
    from multiverso.cli.publish import serve

    return serve(path, name, click.echo)


@app.command()
@click.option("--dtype", multiple=True, show_default="all", help="For tables of this dtype only (may be given again).")
def warmup(dtype: tuple[str, ...]) -> None:
    """Compile all kernels now instead of in the first job (for a container image or a login node)."""
    from multiverso.cli.warmup import report
    from multiverso.errors import DtypeMismatchError
    from multiverso.spec.table import DTYPES, checked_dtype

    try:
        dtypes = [checked_dtype(name) for name in dtype] if dtype else DTYPES
    except DtypeMismatchError as error:
        raise click.BadParameter(str(error)) from None
    click.echo(report(dtypes))


@app.command()
def version() -> None:
    """Print the version."""
    click.echo(f"multiverso {__version__}")


@app.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]), required=False)
def completion(shell: str | None) -> None:
    """Print the script by which a shell completes commands and options: eval "$(multiverso completion bash)".

    Without a name it is for the shell in the variable SHELL.
    """
    from click.shell_completion import get_completion_class

    name = shell or Path(os.environ.get("SHELL", "bash")).name
    made = get_completion_class(name)
    if made is None:
        raise click.BadParameter(f"there is none for {name}; there is for bash, fish and zsh")
    click.echo(made(app, {}, "multiverso", "_MULTIVERSO_COMPLETE").source())


def _complaint(error: Exception) -> str | None:
    """Returns what to say of an error that a user can do something about; None for others."""
    from multiverso.errors import OutOfMemoryError, SnapshotError, StartupError
    from multiverso.launch.processes import HOW_TO_GET_MORE, NONE_LEFT

    if isinstance(error, StartupError | OutOfMemoryError | SnapshotError):
        return str(error)
    if isinstance(error, OSError) and error.errno in NONE_LEFT:
        return f"{error.strerror}; {HOW_TO_GET_MORE}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, RuntimeError) and "new thread" in str(error):  # what Python says where there is none left
        return f"{error}; {HOW_TO_GET_MORE}"
    return None


def main() -> None:
    """Run the command line (`multiverso_program` has let Ctrl-C end it until here)."""
    from multiverso.launch.standard_files import open_standard_files

    open_standard_files()
    try:
        app(prog_name="multiverso")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left but the interpreter's own end
