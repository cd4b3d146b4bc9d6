"""``rlwatch rules``: the alert rules and channels of ``rlwatch.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, tzinfo
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from rlwatch.alerts.rules import AlertingConfig
from rlwatch.cli.console import Cell, print_json, print_table, say
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
from rlwatch.cli.watch_log import LogRecording
from rlwatch.clock import ManualClock
from rlwatch.errors import ConfigError
from rlwatch.importers import ImportedRun
from rlwatch.ports import Store
from rlwatch.records import OutboxMessage, OutboxStatus, RunInfo, Severity, StepRecord
from rlwatch.store.memory import forget
from rlwatch.store.url import open_store
from rlwatch.wording import step

if TYPE_CHECKING:
    from rlwatch.alerts.config import Config
    from rlwatch.alerts.rules import AlertingConfig, Rule
    from rlwatch.control.policy import PermittedAction


# Rehearse alerts: the rows of a log put through everything a live run goes through, and what would have been sent.


NOON = 43_200.0
"""When a log without times begins: twelve o'clock UTC."""


@dataclass(frozen=True, slots=True)
class RehearsalEntry:
    """One thing that was told at a step, or kept back (then ``kept`` says why). ``at``: Unix seconds."""

    step: int
    at: float
    event: str
    severity: str
    kinds: tuple[str, ...]
    channels: tuple[str, ...]
    text: str
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Alerts published and kept back, in order. ``timed``: the rows carry their times."""

    name: str
    lines: tuple[RehearsalEntry, ...]
    timed: bool


def rehearse(imported: ImportedRun, policy: AlertingConfig, *, source: str = "", step_s: float = 60.0) -> Rehearsal:
    """Replay ``imported``; what is told reaches its channel at once. ``step_s``: seconds a step, without times."""
    records, timed = _timed(imported.records, step_s)
    place = f"rehearsal-{uuid4().hex}"
    clock = ManualClock(records[0].ts if records else NOON)
    store = open_store(f"memory://{place}", clock=clock)
    info = RunInfo("log", name=imported.name, source=source or imported.source, created_at=clock.now())
    recording = LogRecording(store, info, policy=policy, on_outcome=lambda _: None, clock=clock, console=True)
    notes = _Notes(store)
    for record in records:
        clock.advance(max(0.0, record.ts - clock.now()))
        recording.take([record])
        recording.tick()
        notes.take(record.step, clock.now(), recording)
    recording.finish("")
    notes.take(records[-1].step if records else 0, clock.now(), recording)
    forget(place)
    return Rehearsal(imported.name, tuple(notes.lines), timed)


class _Notes:
    """Gathers what is new after each row."""

    def __init__(self, store: Store) -> None:
        self.lines: list[RehearsalEntry] = []
        self._store = store
        self._seen = 0
        self._kept: set[tuple[str, str, str]] = set()

    def take(self, step: int, now: float, recording: LogRecording) -> None:
        new = self._store.outbox("log")[self._seen :]
        self._seen += len(new)
        for group in _together(new):
            self.lines.append(_published(step, now, group))
            for message in group:
                self._store.settle_message(replace(message, status=OutboxStatus.SENT, attempts=1, sent_at=now))
        for notice, why in recording.kept:
            alert, event = notice.case.alert, notice.event.value
            if (alert.alert_id, event, why) not in self._kept:
                self._kept.add((alert.alert_id, event, why))
                line = RehearsalEntry(step, now, event, notice.severity.value, (alert.kind,), (), alert.message, why)
                self.lines.append(line)


def _together(messages: Sequence[OutboxMessage]) -> list[list[OutboxMessage]]:
    """Messages that say the same to several channels."""
    groups: dict[str, list[OutboxMessage]] = {}
    for message in messages:
        groups.setdefault(message.payload["text"], []).append(message)
    return list(groups.values())


def _published(step: int, now: float, messages: Sequence[OutboxMessage]) -> RehearsalEntry:
    payload = messages[0].payload
    alerts = [payload["alert"], *payload["also"]]
    return RehearsalEntry(
        step,
        now,
        payload["event"],
        payload["alert"]["severity"],
        tuple(alert["kind"] for alert in alerts),
        tuple(message.channel for message in messages),
        payload["text"],
    )


def _timed(records: Sequence[StepRecord], step_s: float) -> tuple[list[StepRecord], bool]:
    """The records with times; made up from their steps where any has none."""
    if records and all(isfinite(record.ts) and record.ts > 0 for record in records):
        return list(records), True
    first = records[0].step if records else 0
    return [replace(record, ts=NOON + step_s * max(0, record.step - first)) for record in records], False


def moment(at: float, zone: tzinfo | None = None) -> str:
    """Day and time, in ``zone`` (None: of this machine)."""
    return datetime.fromtimestamp(at, zone).astimezone(zone).strftime("%m-%d %H:%M")


# ``rlwatch rules``: the alert rules and channels of ``rlwatch.toml``.


INIT_EPILOG = examples("rlwatch rules init", "rlwatch rules init configs/rlwatch.toml")
TEST_EPILOG = examples(
    "rlwatch rules test",
    "rlwatch rules test configs/rlwatch.toml",
    "rlwatch rules test train.log --config configs/rlwatch.toml",
)

MOST_LISTED = 5
"""Kinds shown one by one where a long list means all but some, or nearly all."""

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
    say(f"wrote {file}")


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
    say(str(config.path or "the defaults (no rlwatch.toml here)"), style="bold")
    print_table(
        ("rule", "about", "from", ">for", ">keep", "tells", "then"), [_cells(rule) for rule in config.policy.rules]
    )
    for line in (*_policy_lines(config.policy), *map(_action_line, actions_of(config)), *_rescue_lines(config)):
        say(line)
    say(f"channels: {', '.join(f'{channel.name} ({channel.kind})' for channel in config.channels)}")
    named = {name for rule in config.rules for name in (*rule.channels, *rule.escalate_to)}
    missing = named - set(config.channel_names)
    if missing:
        say(f"not configured, nothing is sent: {', '.join(sorted(missing))}", style="dim")
    warnings = [*config.warnings, *([config.refused] if config.refused else [])]
    for warning in warnings:
        say(f"warning: {warning}", style="yellow")
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
    from rlwatch.cli.rules import rehearse
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
        say(f"not tested on a log: {', '.join(left)}", style="dim")


def _print_rehearsal(rehearsal: Rehearsal, policy: AlertingConfig) -> None:
    from rlwatch.cli.rules import moment

    zone = policy.quiet_hours[0].zone() if policy.quiet_hours else None if rehearsal.timed else UTC
    say(rehearsal.name or "the log", style="bold")
    if not rehearsal.timed:
        say("the log has no timestamps: times are derived from the steps, starting at 12:00 UTC", style="dim")
    published = [line for line in rehearsal.lines if not line.kept]
    rows = [_line_cells(line, moment(line.at, zone)) for line in rehearsal.lines]
    if rows:
        print_table((">step", "time", "event", "severity", "kinds", "sent to"), rows)
    say(
        f"{len(published)} sent, {len(rehearsal.lines) - len(published)} suppressed"
        if rows
        else "no alerts would have been sent"
    )


def _line_cells(line: RehearsalEntry, when: str) -> list[Cell]:
    to: Cell = (f"not sent: {line.kept}", "dim") if line.kept else ", ".join(line.channels)
    return [step(line.step), when, line.event, severity_cell(line.severity), ", ".join(line.kinds), to]


def _policy_lines(policy: AlertingConfig) -> Iterator[str]:
    """Settings that apply to all rules, a line each."""
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
    """Kinds and detectors; of a long list of exceptions only how long it is."""
    spared = rule.except_kinds
    but = [f"all but {len(spared)} kinds"] if len(spared) > MOST_LISTED else [f"not {kind}" for kind in spared]
    return ", ".join((*rule.kinds, *rule.detectors, *but)) or "everything"


def _later(rule: Rule) -> str:
    """The escalation if nobody acknowledges it."""
    parts = [f"repeats every {rule.repeat_minutes:g} min"] if rule.repeat_minutes else []
    after = [f"{rule.escalate_after_minutes:g} min"] if rule.escalate_after_minutes else []
    after += [f"{rule.escalate_after_steps} steps"] if rule.escalate_after_steps else []
    if after:
        level = [rule.escalate_severity.value] if rule.escalate_severity is not None else []
        parts.append(f"after {' or '.join(after)} {', '.join([*level, *rule.escalate_to])}")
    return "; ".join(parts)
