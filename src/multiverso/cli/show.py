"""Print what the doctor found."""

import json
from collections.abc import Iterable
from dataclasses import asdict

import click

from multiverso.cli.doctor import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_findings(findings: Iterable[Finding], as_json: bool) -> int:
    """Prints findings as they come; returns the exit code."""
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
        click.echo("multiverso does not work here." if failed else "multiverso works here.")
    return int(failed)
