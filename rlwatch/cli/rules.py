"""``rlwatch rules``: write, check and test the alert rules and channels of ``rlwatch.toml``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import Cell, print_json, print_table, print_text
from rlwatch.cli.options import (
    ConfigOption,
    FormatOption,
    OutputFormat,
    ReadAsOption,
    RunOfLogOption,
    TrainerOption,
    configured,
    examples,
    naming_of,
)
from rlwatch.cli.view_text import severity_cell
from rlwatch.errors import ConfigError
from rlwatch.records import Severity
from rlwatch.wording import step

if TYPE_CHECKING:
    from rlwatch.alerts.config import Config
    from rlwatch.alerts.rules import AlertingConfig, Rule
    from rlwatch.cli.rehearsal import Rehearsal, RehearsalEntry
    from rlwatch.control.policy import PermittedAction

INIT_EPILOG = examples("rlwatch rules init", "rlwatch rules init configs/rlwatch.toml")
TEST_EPILOG = examples(
    "rlwatch rules test",
    "rlwatch rules test configs/rlwatch.toml",
    "rlwatch rules test train.log --config configs/rlwatch.toml",
)

MOST_LISTED = 5
"""Most kinds of finding that are printed one by one; a longer list is abbreviated."""

rules = typer.Typer(
    help="Alert rules: write a commented rlwatch.toml, check it, test it on a log.",
    no_args_is_help=True,
    epilog=examples("rlwatch rules init", "rlwatch rules test", "rlwatch rules test train.log"),
)


@rules.command("init", epilog=INIT_EPILOG)
def init(file: Annotated[Path, typer.Argument(help="Output file.")] = Path("rlwatch.toml")) -> None:
    """Write a commented rlwatch.toml with the default rules; never overwrites."""
    from rlwatch.alerts.config import default_toml

    text = default_toml()
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} already exists and was not changed") from None
    print_text(f"wrote {file}")


@rules.command("test", epilog=TEST_EPILOG)
def check(
    subject: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE.toml | LOG]",
            help="Configuration to check, or log to test it on.",
            show_default="./rlwatch.toml, else the defaults",
        ),
    ] = None,
    *,
    config: ConfigOption = None,
    run: RunOfLogOption = None,
    read_as: ReadAsOption = None,
    source: TrainerOption = "",
    step_seconds: Annotated[
        float, typer.Option("--step-seconds", min=0.001, help="Duration of a step, if the log has no timestamps.")
    ] = 60.0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Check a configuration; with a log, show which alerts would have been sent or suppressed, and why.

    Exit code 0: fine, 1: valid but probably a mistake (a rule that can never fire), 2: invalid. With a log: 0. Times
    are those of the log's rows. Heartbeats are not checked, no action is taken, and delivery is immediate.
    """
    if subject is None or subject.suffix == ".toml":
        _check_file(subject or config)
    else:
        _try_on(subject, run, read_as, source=source, config=config, step_s=step_seconds, output=output)


def _check_file(file: Path | None) -> None:
    from rlwatch.alerts.config import load_config
    from rlwatch.run.alerting import actions_of

    config = load_config(file)
    print_text(str(config.path or "the defaults (no rlwatch.toml here)"), style="bold")
    print_table(
        ("rule", "about", "from", ">for", ">keep", "tells", "then"), [_cells(rule) for rule in config.policy.rules]
    )
    for line in (*_policy_lines(config.policy), *map(_action_line, actions_of(config)), *_rescue_lines(config)):
        print_text(line)
    print_text(f"channels: {', '.join(f'{channel.name} ({channel.kind})' for channel in config.channels)}")
    named = {name for rule in config.rules for name in (*rule.channels, *rule.escalate_to)}
    missing = named - set(config.channel_names)
    if missing:
        print_text(f"not configured, nothing is sent: {', '.join(sorted(missing))}", style="dim")
    warnings = [*config.warnings, *([config.refused] if config.refused else [])]
    for warning in warnings:
        print_text(f"warning: {warning}", style="yellow")
    if warnings:
        raise typer.Exit(1)


def _rescue_lines(config: Config) -> list[str]:
    from rlwatch.run.alerting import rescue_of

    policy = rescue_of(config)
    if policy is None:
        return []
    mode = "tried out only (dry_run)" if policy.dry_run else f"at most {policy.most} times"
    return [f"rescue {policy.name!r}: rolls back and removes the cause of a collapse, {mode}"]


def _try_on(
    log: Path,
    run: str | None,
    read_as: str | None,
    *,
    source: str,
    config: Path | None,
    step_s: float,
    output: OutputFormat,
) -> None:
    from rlwatch.alerts.rules import HEARTBEAT_KINDS
    from rlwatch.cli.console import reading
    from rlwatch.cli.rehearsal import rehearse
    from rlwatch.importers import read_log
    from rlwatch.run.alerting import actions_of

    loaded = configured(config)
    policy, actions = loaded.policy, actions_of(loaded)
    with reading(log):
        runs = read_log(log, run=run, format=read_as, naming=naming_of(None, config))
    found = [rehearse(imported, policy, source=source, step_s=step_s) for imported in runs]
    if output is OutputFormat.JSON:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            _print_rehearsal(each, policy)
        left = [*HEARTBEAT_KINDS, *(f"action {action.name!r}" for action in actions)]
        print_text(f"not tested on a log: {', '.join(left)}", style="dim")


def _print_rehearsal(rehearsal: Rehearsal, policy: AlertingConfig) -> None:
    from rlwatch.cli.rehearsal import moment

    zone = policy.quiet_hours[0].zone() if policy.quiet_hours else None if rehearsal.timed else UTC
    print_text(rehearsal.name or "the log", style="bold")
    if not rehearsal.timed:
        print_text("the log has no timestamps: times are derived from the steps, starting at 12:00 UTC", style="dim")
    published = [line for line in rehearsal.lines if not line.kept]
    rows = [_line_cells(line, moment(line.at, zone)) for line in rehearsal.lines]
    if rows:
        print_table((">step", "time", "event", "severity", "kinds", "sent to"), rows)
    print_text(
        f"{len(published)} sent, {len(rehearsal.lines) - len(published)} suppressed"
        if rows
        else "no alerts would have been sent"
    )


def _line_cells(line: RehearsalEntry, when: str) -> list[Cell]:
    to: Cell = (f"not sent: {line.kept}", "dim") if line.kept else ", ".join(line.channels)
    return [step(line.step), when, line.event, severity_cell(line.severity), ", ".join(line.kinds), to]


def _policy_lines(policy: AlertingConfig) -> Iterator[str]:
    """Return the settings that apply to all rules, one a line."""
    grouping = policy.grouping
    wait = f", waiting {grouping.wait_s:g} s for each other" if grouping.wait_s else ""
    yield f"alerts grouped by {grouping.by.value}{wait}"
    for hours in policy.quiet_hours:
        days = "" if len(hours.days) == 7 else f" on {', '.join(hours.days)}"
        yield f"quiet from {hours.start:%H:%M} to {hours.end:%H:%M} {hours.time_zone}{days} for less than " + (
            hours.let_through.value
        )
    for each in policy.inhibitions:
        mutes = ", ".join(each.mutes) or "all others"
        level = "" if each.up_to is Severity.CRITICAL else f" up to {each.up_to.value}"
        when = " or ".join(each.when) if len(each.when) <= MOST_LISTED else f"any of {len(each.when)} kinds"
        yield f"while {when} is {each.min_severity.value}, kept back{level}: {mutes}"


def _action_line(action: PermittedAction) -> str:
    from rlwatch.control.commands import command_kind

    takes = command_kind(action.do).args
    given = {name: value for name, value in action.args.items() if value != takes[name].default}
    args = "".join(f" {name}={value}" for name, value in given.items())
    often = f"at most {action.most} in a run, {action.cooldown_steps} steps apart"
    return (
        f"action {action.name!r}: {'tries out' if action.dry_run else 'asks for'} {action.do}{args} upon "
        f"{', '.join(action.kinds)} ({action.min_severity.value} or worse), {often}"
    )


def _cells(rule: Rule) -> list[Cell]:
    patience = str(rule.for_steps) if rule.for_critical is None else f"{rule.for_steps} (critical {rule.for_critical})"
    return [
        rule.name,
        _about(rule),
        severity_cell(rule.min_severity),
        patience,
        str(rule.keep_firing_for),
        ", ".join(rule.channels) or "nobody",
        _later(rule),
    ]


def _about(rule: Rule) -> str:
    """Return kinds and detectors of a rule; of a long list of exceptions only the number."""
    spared = rule.except_kinds
    but = [f"all but {len(spared)} kinds"] if len(spared) > MOST_LISTED else [f"not {kind}" for kind in spared]
    return ", ".join((*rule.kinds, *rule.detectors, *but)) or "everything"


def _later(rule: Rule) -> str:
    """Return the repetition and the escalation of an alert that is not acknowledged."""
    parts = [f"repeats every {rule.repeat_minutes:g} min"] if rule.repeat_minutes else []
    after = [f"{rule.escalate_after_minutes:g} min"] if rule.escalate_after_minutes else []
    after += [f"{rule.escalate_after_steps} steps"] if rule.escalate_after_steps else []
    if after:
        level = [rule.escalate_severity.value] if rule.escalate_severity is not None else []
        parts.append(f"after {' or '.join(after)} {', '.join([*level, *rule.escalate_to])}")
    return "; ".join(parts)
