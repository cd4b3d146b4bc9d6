"""``rlwatch doctor``: what is installed, what works, and what to do about the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from rlwatch.cli.checks import Check, Level, installation, storage, verl, webhook
from rlwatch.cli.console import print_json, print_table
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples

EPILOG = examples("rlwatch doctor", "rlwatch doctor --ping", "rlwatch doctor --format json")

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor(
    store: StoreOption = None,
    ping: Annotated[bool, typer.Option("--ping", help="Ask the webhook's receiver whether it is there.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Check the installation, the store and the webhook. Exit code 0, or 1 if anything fails."""
    checks = examine(store, ping=ping)
    if output is Format.JSON:
        print_json(checks)
    else:
        rows = [((check.level.value, STYLES[check.level]), check.name, check.text) for check in checks]
        print_table(("", "what", "how it is"), rows)
    if any(check.level is Level.FAIL for check in checks):
        raise typer.Exit(1)


def examine(store: str | None, *, ping: bool = False) -> list[Check]:
    """Every check, in the order of a person's questions."""
    return [
        installation.python(),
        installation.sqlite(),
        installation.package(),
        installation.namesake(),
        *installation.extras(),
        installation.dashboard_login(),
        *installation.trainers(),
        *verl.examine(),
        *storage.examine(store),
        *webhook.examine(ping=ping, store_root=storage.root_of(store)),
    ]
