"""``rlwatch rules``: the alert rules and channels of ``rlwatch.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import Cell, print_table, say
from rlwatch.cli.findings_table import severity_cell
from rlwatch.cli.options import examples
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.alerts.rules import Rule

INIT_EPILOG = examples("rlwatch rules init", "rlwatch rules init configs/rlwatch.toml")
TEST_EPILOG = examples("rlwatch rules test", "rlwatch rules test configs/rlwatch.toml")

rules = typer.Typer(
    help="Alert rules: write a commented rlwatch.toml, check one.",
    no_args_is_help=True,
    epilog=examples("rlwatch rules init", "rlwatch rules test"),
)


@rules.command("init", epilog=INIT_EPILOG)
def init(file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("rlwatch.toml")) -> None:
    """Write a commented rlwatch.toml with the default rules; never overwrites."""
    from rlwatch.alerts.config import default_toml

    text = default_toml()
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; it is left as it is") from None
    say(f"wrote {file}")


@rules.command("test", epilog=TEST_EPILOG)
def check(
    file: Annotated[
        Path | None, typer.Argument(help="The configuration file.", show_default="./rlwatch.toml, else the defaults")
    ] = None,
) -> None:
    """Check a configuration and show what it amounts to; rlwatch scan LOG --config FILE tries it on a log.

    Exit code 0: fine, 1: allowed but surely not meant (a rule that can never fire), 2: wrong.
    """
    from rlwatch.alerts.config import load_config

    config = load_config(file)
    say(str(config.path or "the defaults (there is no rlwatch.toml here)"), style="bold")
    print_table(("rule", "about", "from", ">for", ">keep", "tells"), [_cells(rule) for rule in config.rules])
    say(f"channels: {', '.join(f'{channel.name} ({channel.kind})' for channel in config.channels)}")
    missing = {name for rule in config.rules for name in rule.channels} - set(config.channel_names)
    if missing:
        say(f"not configured, so nobody is told there: {', '.join(sorted(missing))}", style="dim")
    for warning in config.warnings:
        say(f"warning: {warning}", style="yellow")
    if config.warnings:
        raise typer.Exit(1)


def _cells(rule: Rule) -> list[Cell]:
    about = ", ".join((*rule.kinds, *rule.detectors, *(f"not {kind}" for kind in rule.except_kinds))) or "everything"
    patience = str(rule.for_steps) if rule.for_critical is None else f"{rule.for_steps} (critical {rule.for_critical})"
    return [
        rule.name,
        about,
        severity_cell(rule.min_severity),
        patience,
        str(rule.keep_firing_for),
        ", ".join(rule.channels) or "nobody",
    ]
