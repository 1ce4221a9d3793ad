"""Print what the doctor found."""

import json
from collections.abc import Iterable
from dataclasses import asdict

import click

from multiverso.cli.doctor import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_HERE = ("multiverso works here.", "multiverso does not work here.")


def show_findings(findings: Iterable[Finding], as_json: bool, verdicts: tuple[str, str] = _HERE) -> int:
    """Prints findings as they come; returns the exit code.

    Args:
        findings: what was found.
        as_json: for a program.
        verdicts: what to say at the end, where nothing has failed and where something has.
    """
    seen = []
    for finding in findings:
        seen.append(finding)
        if not as_json:
            state = click.style(f"{finding.state:4}", fg=_COLOURS[finding.state], bold=True)
            click.echo(f"{state}  {finding.name:16}  {finding.text}")
            if finding.advice:
                click.echo(f"{'':24}-> {finding.advice}")
    failed = any(finding.state == "fail" for finding in seen)
    if as_json:
        checks = [asdict(finding) for finding in seen]
        click.echo(json.dumps({"ok": not failed, "checks": checks}, indent=2))
    else:
        click.echo(verdicts[failed])
    return int(failed)
