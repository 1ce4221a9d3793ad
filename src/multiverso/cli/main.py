"""The command line: parse, call, print. A command's imports are made when it runs, so that help is quick."""

import signal
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands; a script in the place of one is pointed out."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command."""
        if self.get_command(ctx, args[0]) is None and Path(args[0]).is_file():
            ctx.fail(f"{args[0]} is a file, not a command; to start it: multiverso run -n 4 {args[0]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="Shared model parameters for training processes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


class OnFailure(StrEnum):
    """What happens to the other workers when one fails."""

    stop = "stop"
    carry_on = "continue"


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Shared model parameters for training processes."""
    if context.invoked_subcommand != "run":  # which has no use for a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)


_RUN_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


@app.command(name="run", context_settings=_RUN_SETTINGS)
def run_command(
    target: Annotated[str, typer.Argument(help="A Python script, or any program; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The target's own arguments.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("-n", "-np", "--workers", help="How many workers to start.", show_default="1"),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run the target as `python -m` does.")] = False,
    on_failure: Annotated[
        OnFailure, typer.Option(help="When a worker fails: stop the others, or let them continue without it.")
    ] = OnFailure.stop,
    gpus: Annotated[
        str | None, typer.Option(help="'auto' or a list such as 0,1: worker i sees only the i-th of them.")
    ] = None,
    bind: Annotated[bool, typer.Option("--bind", help="Divide the cores among the workers.")] = False,
    log_dir: Annotated[
        Path | None, typer.Option(help="Write each worker's output to worker-<i>.log in this folder, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object a line.")] = False,
    show_summary: Annotated[
        bool,
        typer.Option(
            "--summary", help="Say at the end what each worker did: operations, staleness, waits, mv.log."
        ),
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="End the job after this many seconds.")] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Restart a failed job, up to this many times, from its newest checkpoint, where it makes some "
            "(multiverso.checkpoint)."
        ),
    ] = 0,
    replace: Annotated[
        int,
        typer.Option(
            help="With --on-failure continue: restart a failed worker in the same place, while the others go on; this "
            "many restarts in all (with --hosts, on each host, and as many lost hosts in all)."
        ),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest checkpoint of an earlier run, if there is one."),
    ] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Hosts' names with commas between them, reached by ssh; or a number: rehearse that many on this "
            "machine, each with a node and memory of its own. -n workers in all are spread over them evenly."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Where the first of several hosts listens for the others.")
    ] = 29600,
    ssh: Annotated[str, typer.Option(help="The command that reaches a host.")] = "ssh -o BatchMode=yes",
    insecure_fabric: Annotated[
        bool,
        typer.Option("--insecure-fabric", help="Between hosts: encrypt nothing, on a network you trust."),
    ] = False,
    host_grace: Annotated[
        float,
        typer.Option(
            help="Seconds without a word of a host until it counts as lost; a shorter cut is survived."
        ),
    ] = 30.0,
    wire: Annotated[
        str | None,
        typer.Option(
            help="How changes travel between hosts: native, float32, bfloat16, int8, topk or topk:F."
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            help="How often a host sends what has changed: a number of seconds, or a text such as '100 adds'."
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            help="What is made of the hosts' changes: sum, mean, local_sgd, diloco or diloco:LR,MOMENTUM."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that workers get to end by themselves, before they are killed.")
    ] = 1.0,
) -> None:
    """Start a program in several workers of one job, on this host or, with --hosts, on several.

    Each line of output gets its worker's number. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on.
    OMP_NUM_THREADS is set to cores / workers where it is not set already.

    The exit code is 0 when all workers succeeded; otherwise the failed worker's (128 + n for a signal n).
    With --on-failure continue it is 0 when at least one worker succeeded. 124: timeout; 130: Ctrl-C; 2: not
    started, because an option makes no sense here. With --max-restarts it is the last start's; a signal or the
    timeout, which is for all starts together, ends the job for good.
    """
    from multiverso.launch.local import launch
    from multiverso.launch.options import RunOptions

    summary: Callable[[dict[str, Any]], str] | None = None
    if show_summary:
        from multiverso.cli import top as showing

        summary = showing.summary

    exchange = {"wire": wire, "every": every, "between": between}
    options = RunOptions(
        target=target,
        arguments=tuple(arguments or ()),
        workers=workers,
        module=module,
        on_failure="continue" if on_failure is OnFailure.carry_on else "stop",
        gpus=gpus,
        bind=bind,
        log_dir=log_dir,
        json=as_json,
        timeout_seconds=timeout,
        grace_seconds=grace,
        summary=summary,
        hosts=hosts,
        port=port,
        ssh=ssh,
        encrypted=not insecure_fabric,
        host_grace=host_grace,
        max_restarts=max_restarts,
        replace=replace,
        resume=resume,
        exchange={name: text for name, text in exchange.items() if text is not None},
    )
    start = launch
    if hosts is not None:
        from multiverso.launch.hosts import launch_on_hosts as start
    raise typer.Exit(_or_complain(lambda: start(options)))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Can these hosts run a job together? Versions, ports, clocks, encryption."
        ),
    ] = None,
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="What reaches a host.")] = (
        "ssh -o BatchMode=yes"  # as `run` does: a question that somebody answers here nobody answers there
    ),
    port: Annotated[int, typer.Option(help="Where the first host would listen for the others.")] = 29600,
    probe: Annotated[bool, typer.Option("--probe", hidden=True)] = False,
) -> None:
    """Try what multiverso depends on here, and say what to do where it fails.

    With --hosts, try what a job on several hosts depends on. The exit code is 1 when something failed.
    """
    from multiverso.cli.doctor import examine
    from multiverso.cli.show import show_findings

    if probe:
        from multiverso.cli.host_probe import probe as answer

        answer()
    elif hosts is None:
        raise typer.Exit(show_findings(examine(), as_json))
    else:
        from multiverso.cli.host_doctor import examine_hosts

        raise typer.Exit(_or_complain(lambda: show_findings(examine_hosts(hosts, ssh, port), as_json)))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Show the jobs once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the jobs once as a JSON list.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds from one look to the next.")] = 1.0,
    job: Annotated[
        str | None,
        typer.Option("--job", help="Only this one: its script's name, a worker's pid, or its address."),
    ] = None,
) -> None:
    """Show the running jobs of this user, live: workers, what they wait for, tables. Ctrl-C ends it.

    Of each worker: operations a second, how many pushes of others come between its reads (stale), how many operations
    it is behind the one that has done most (lag), and what it says by mv.log.
    """
    from multiverso.cli.top import show_jobs

    show = partial(show_jobs, once=once, as_json=as_json, interval_seconds=interval, job=job)
    raise typer.Exit(_or_complain(show))


@app.command()
def bench(
    full: Annotated[
        bool, typer.Option("--full", help="All sizes and up to 4 workers: some minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Measure the tables on this machine, beside the same loops on private memory in the same run."""
    import json

    from rich.console import Console

    from multiverso.bench import FULL, QUICK, measure, render

    say = Console(stderr=True)
    result = measure(FULL if full else QUICK, lambda what: say.print(f"measuring: {what} ..."))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        Console().print(render(result))


@app.command()
def warmup(
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", help="For tables of this dtype only (may be given again).", show_default="all"
        ),
    ] = None,
) -> None:
    """Compile all kernels now, so that no job has to (a container image, a login node, the first of many jobs)."""
    from multiverso.cli.warmup import report
    from multiverso.errors import DtypeMismatchError
    from multiverso.spec import DTYPES, checked_dtype

    try:
        dtypes = [checked_dtype(name) for name in dtype] if dtype else DTYPES
    except DtypeMismatchError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(report(dtypes))


@app.command()
def version() -> None:
    """Print the version."""
    from multiverso import __version__

    typer.echo(f"multiverso {__version__}")


def _or_complain(action: Callable[[], int]) -> int:
    from multiverso.errors import OutOfMemoryError, StartupError
    from multiverso.launch.processes import HOW_TO_GET_MORE, NONE_LEFT

    try:
        return action()
    except (StartupError, OutOfMemoryError) as error:
        typer.echo(f"multiverso: {error}", err=True)
    except OSError as error:
        if error.errno not in NONE_LEFT:
            raise
        typer.echo(f"multiverso: {error.strerror}; {HOW_TO_GET_MORE}", err=True)
    return 2


def main() -> None:
    """Run the command line (`multiverso_program` has let Ctrl-C end it until here)."""
    from multiverso.launch.standard_files import open_standard_files

    open_standard_files()
    try:
        app(prog_name="multiverso")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left but the interpreter's own end
