"""``rlwatch alerts``: alerts and their deliveries; acknowledge, silence, retry, and test a channel."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.background import deliver_once
from rlwatch.cli.console import Cell, cell_of, plain, print_json, print_table, print_text
from rlwatch.cli.incidents import (
    INCIDENTS,
    NOTE,
    SNOOZE,
    delivery_cell,
    delivery_of,
    incidents,
    note,
    snooze,
)
from rlwatch.cli.options import ByOption, ConfigOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.clock import SystemClock
from rlwatch.columns import ALERTS, heads
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Alert, OutboxMessage, OutboxStatus, Silence
from rlwatch.wording import duration, for_terminal, local_moment, meant, one_line, step

if TYPE_CHECKING:
    from rlwatch.alerts.outbox import Trial
    from rlwatch.ports import Store


SHOWN = ("alert_id", "state", "severity", "kind", "run_id", "onset_step", "step")
"""Columns of the list of alerts, to the left of the delivery and the message."""
EPILOG = examples(
    "rlwatch alerts list",
    "rlwatch alerts list math-7b-s3",
    "rlwatch alerts list --format json | jq '.[] | select(.state == \"firing\")'",
)


def alerts(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List alerts, newest first, with deliveries and the reason if one is silenced."""
    with opened(store) as source:
        run_id = None if run is None else find_run(source, run).run_id
        found = source.alerts(run_id)
        messages = source.outbox(run_id)
        quiet = _why_quiet(source, found, run_id, config)
    rows = [alert_row(alert, messages) | {"quiet": quiet.get(alert.alert_id, "")} for alert in found]
    if output is OutputFormat.JSON:
        print_json(rows)
    elif not rows:
        print_text("no alerts")
    else:
        print_table(
            [*heads(ALERTS, SHOWN), "delivery", *heads(ALERTS, ["message"])],
            [_alert_cells(row) for row in rows],
        )


def _why_quiet(store: Store, found: Sequence[Alert], run_id: str | None, config: Path | None) -> dict[str, str]:
    from rlwatch.alerts.config import load_config
    from rlwatch.alerts.silencing import quiet_reasons

    policy = load_config(config, store_root=getattr(store, "root", None)).policy
    runs = {run.run_id: run for run in store.runs()}
    return quiet_reasons(
        found,
        policy,
        SystemClock().now(),
        runs=runs,
        acknowledgements=store.acknowledgements(run_id),
        silences=store.silences(),
    )


def alert_row(alert: Alert, messages: Sequence[OutboxMessage]) -> dict[str, JSON]:
    """Return the fields of ``alert`` as plain values, plus ``delivery``: those of ``messages`` that concern the alert,
    without their payload.
    """
    from rlwatch.alerts.matching import alert_ids

    mine = [message for message in messages if alert.alert_id in alert_ids(message)]
    delivery = delivery_of(mine)
    return dict(plain(alert)) | {"delivery": plain(delivery)}


def _alert_cells(row: dict[str, JSON]) -> list[Cell]:
    what = one_line(row["message"], 80)
    return [
        *(cell_of(ALERTS[name], row[name]) for name in SHOWN),
        delivery_cell(row["delivery"]),
        f"{what} ({one_line(row['quiet'], 80)})" if row["quiet"] else what,
    ]


# ``rlwatch alerts ack | silence | silences | unsilence``: actions of users on alerts.

ACK = examples("rlwatch alerts ack 3f2a9c", "rlwatch alerts ack 3f2a9c --by ann --why 'rolled back to step 400'")
SILENCE = examples(
    "rlwatch alerts silence --run math-7b-s3 --for 2h --why 'new data, expected'",
    "rlwatch alerts silence --kind grad_spike --label team=rl --for 1d --why 'clipping is being tuned'",
    "rlwatch alerts silence --all --until 2026-12-24T18:00 --why 'the cluster is down'",
)
SILENCES = examples("rlwatch alerts silences", "rlwatch alerts silences --over")
UNSILENCE = examples("rlwatch alerts unsilence 5d1e")


def ack(
    alert: Annotated[str, typer.Argument(metavar="ALERT", help="Alert id or a unique prefix; see rlwatch alerts.")],
    *,
    by: ByOption = "",
    why: Annotated[str, typer.Option("--why", help="What you are doing about the alert.")] = "",
    whole: Annotated[
        bool, typer.Option("--incident", help="Also acknowledge the other firing alerts of its incident.")
    ] = False,
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Acknowledge a firing alert: stops repeats and escalation unless it gets worse. Its resolution is still sent."""
    from rlwatch.alerts.silencing import acknowledge, find_alert
    from rlwatch.cli.incidents import incident_record

    with opened(store) as target:
        chosen = incident_record(target, alert, config).incident.firing if whole else ()
        for found in chosen or [find_alert(target.alerts(), alert)]:
            kept = acknowledge(target, found, by=by or me(), why=why)
            whose = f"{found.kind} on {found.run_id} since step {step(found.onset_step)}"
            before = "" if kept.by == (by or me()).strip() else ", previously acknowledged"
            print_text(f"{found.alert_id}: {whose}: acknowledged by {kept.by}{before}")


def silence(
    *,
    run: Annotated[str, typer.Option("--run", help="Only alerts of this run (exact id or name).")] = "",
    project: Annotated[str, typer.Option("--project", help="Only alerts of this project.")] = "",
    kind: Annotated[str, typer.Option("--kind", help="Only alerts of this kind, e.g. entropy_collapse.")] = "",
    rule: Annotated[str, typer.Option("--rule", help="Only alerts of this rule.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Only alerts of rules with this label.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All alerts of this store.")] = False,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="Duration: 90m, 2h, 1d12h.")] = "",
    until: Annotated[
        str, typer.Option("--until", metavar="WHEN", help="End time instead of a duration: 2026-12-24T18:00.")
    ] = "",
    by: ByOption = "",
    why: Annotated[str, typer.Option("--why", help="Reason, shown with every silenced alert.")] = "",
    store: StoreOption = None,
) -> None:
    """Silence alerts that match all given options; alerts that still fire afterwards are sent."""
    from rlwatch.alerts import silencing
    from rlwatch.alerts.rules import builtin_kinds

    for_s = _length(duration, until, SystemClock().now())
    labels = _labels(label or [])
    with opened(store) as target:
        fresh = silencing.silence(
            target,
            by=by or me(),
            why=why,
            for_s=for_s,
            run=run,
            project=project,
            kind=kind,
            rule=rule,
            labels=labels,
            everything=everything,
        )
        names = [] if not run else [name for one in target.runs() for name in (one.run_id, one.name) if name]
    print_text(f"{fresh.silence_id}: {silencing.matchers(fresh)} silenced until {local_moment(fresh.until)}")
    if run and run not in names:
        print_text(f"no run is called {run!r} yet{meant(run, names)}", style="yellow")
    if kind and kind not in builtin_kinds():
        print_text(f"no shipped detector reports the kind {kind!r}{meant(kind, builtin_kinds())}", style="yellow")


def silences(
    over: Annotated[bool, typer.Option("--over", help="Include expired silences.")] = False,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List silences, newest last."""
    now = SystemClock().now()
    with opened(store) as source:
        found = [each for each in source.silences() if over or each.until > now]
    if output is OutputFormat.JSON:
        print_json([dict(plain(each)) | {"over": each.until <= now} for each in found])
    elif not found:
        print_text("no silences")
    else:
        print_table(("id", "what", "until", ">left", "by", "why"), [_silence_cells(each, now) for each in found])


def unsilence(
    silence_id: Annotated[str, typer.Argument(metavar="ID", help="Silence id or a unique prefix.")],
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """End a silence now; alerts that still fire are sent."""
    from rlwatch.alerts.silencing import end_silence, matchers

    with opened(store) as target:
        ended = end_silence(target, silence_id, by=by or me())
    print_text(f"{ended.silence_id}: {matchers(ended)} no longer silenced")


def _silence_cells(silence: Silence, now: float) -> list[Cell]:
    from rlwatch.alerts.silencing import matchers

    left: Cell = duration(silence.until - now) if silence.until > now else ("over", "dim")
    return [
        silence.silence_id,
        matchers(silence),
        local_moment(silence.until),
        left,
        silence.by,
        one_line(silence.why, 80),
    ]


def _length(duration: str, until: str, now: float) -> float:
    from rlwatch.alerts.silencing import seconds_of

    if bool(duration) == bool(until):
        raise ConfigError("give the length of the silence: either --for 2h or --until 2026-12-24T18:00")
    if duration:
        return seconds_of(duration)
    try:
        end = datetime.fromisoformat(until).timestamp()
    except ValueError:
        raise ConfigError(f"--until {until!r} is not a time; give local time as in 2026-12-24T18:00") from None
    if end <= now:
        raise ConfigError(f"--until {until} is in the past")
    return end - now


def _labels(given: list[str]) -> dict[str, str]:
    wrong = [text for text in given if "=" not in text or text.startswith("=")]
    if wrong:
        raise ConfigError(f"--label {wrong[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in given)}


# ``rlwatch alerts test | dead | retry``: test a channel, list undelivered messages, and send them again.

TEST = examples("rlwatch alerts test", "rlwatch alerts test --channel slack")
DEAD = examples("rlwatch alerts dead", "rlwatch alerts dead math-7b-s3 --format json")
RETRY = examples("rlwatch alerts retry 5d1e9a", "rlwatch alerts retry --all")


def trial(
    channel: Annotated[
        str, typer.Option("--channel", metavar="NAME", help="Only this channel.", show_default="all but the console")
    ] = "",
    config: ConfigOption = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Send a test message to each channel on the path of alerts, and print the answers.

    Exit code 0: all channels accepted it, 1: one did not.
    """
    from rlwatch.alerts.config import build_notifiers, load_config
    from rlwatch.alerts.outbox import try_channels

    with opened(store) as place:
        loaded = load_config(config, store_root=getattr(place, "root", None))
    if channel and channel not in loaded.channel_names:
        raise ConfigError(f"no channel is called {channel!r}; configured channels: {', '.join(loaded.channel_names)}")
    built = build_notifiers(loaded, console=channel == "console")
    chosen = {name: notifier for name, notifier in built.items() if channel in ("", name)}
    if not chosen:
        raise ConfigError("no channel to test: add [notify.NAME] to rlwatch.toml or set RLWATCH_WEBHOOK_URL")
    trials = try_channels(chosen, dashboard_url=loaded.dashboard_url)
    _show_trials(trials, output)
    if not all(trial.delivery.ok for trial in trials):
        raise typer.Exit(1)


def dead(
    run: Annotated[str | None, typer.Argument(help="Only messages of this run: id, name or unique prefix.")] = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List undelivered messages with the reason; rlwatch alerts retry sends them again."""
    with opened(store) as source:
        run_id = None if run is None else find_run(source, run).run_id
        given_up = [message for message in source.outbox(run_id) if message.status is OutboxStatus.DEAD]
    rows = [_message_row(message) for message in given_up]
    if output is OutputFormat.JSON:
        print_json(rows)
    elif not rows:
        print_text("no undelivered messages")
    else:
        print_table(
            ("message", "channel", "run", "event", "what", ">tries", "written", "why"), map(_message_cells, rows)
        )


def retry(
    message: Annotated[
        str, typer.Argument(metavar="[MESSAGE]", help="Message id or a unique prefix; see rlwatch alerts dead.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Retry all undelivered messages.")] = False,
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Retry undelivered messages now, under the same id."""
    from rlwatch.cli.options import alerting_of

    if bool(message) == everything:
        raise ConfigError("give a message id or --all")
    with opened(store) as target:
        chosen = _messages_to_retry(target.outbox(), message)
        alerting = alerting_of(config, target)
        for each in chosen:
            target.retry_message(each)
        outcome = deliver_once(target, alerting) if chosen else ""
    elsewhere = sorted({each.channel for each in chosen} - set(alerting.notifiers))
    print_text(f"{len(chosen)} queued for retry" + (f": {outcome}" if outcome else ""))
    if elsewhere:
        print_text(
            f"channel not configured here, left to a process that has it: {', '.join(map(for_terminal, elsewhere))}",
            style="dim",
        )


def _messages_to_retry(outbox: list[OutboxMessage], beginning: str) -> list[OutboxMessage]:
    """Return the undelivered messages, or the unsent one whose id has this prefix. Raises ``ConfigError``."""
    if not beginning:
        return [message for message in outbox if message.status is OutboxStatus.DEAD]
    found = [message for message in outbox if message.message_id.startswith(beginning)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} messages have an id that begins with {beginning!r}")
    if found[0].status is OutboxStatus.SENT:
        raise ConfigError(f"message {found[0].message_id} was already delivered")
    return found


def _message_row(message: OutboxMessage) -> dict[str, JSON]:
    alert = message.payload.get("alert") or {}
    return {
        "message_id": message.message_id,
        "run_id": message.run_id,
        "alert_id": message.alert_id,
        "channel": message.channel,
        "event": message.payload.get("event"),
        "kind": alert.get("kind") if isinstance(alert, dict) else None,
        "attempts": message.attempts,
        "created_at": message.created_at,
        "last_error": message.last_error,
    }


def _message_cells(row: dict[str, JSON]) -> list[Cell]:
    written = f"{duration(SystemClock().now() - row['created_at'])} ago"
    what = [one_line(str(row[key] or ""), 40) for key in ("channel", "run_id", "event", "kind")]
    return [row["message_id"][:12], *what, str(row["attempts"]), written, one_line(row["last_error"], 80)]


def _show_trials(trials: list[Trial], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json(
            [plain(trial.delivery) | {"channel": trial.channel, "message_id": trial.message_id} for trial in trials]
        )
        return
    words = {True: ("delivered", "green"), False: ("failed", "bold red")}
    rows: list[list[Cell]] = [
        [t.channel, words[t.delivery.ok], one_line(t.delivery.reason, 100), t.message_id] for t in trials
    ]
    print_table(("channel", "", "answer", "message"), rows)


# ``rlwatch alerts``: the group of commands; without the name of a command it lists alerts.

LIST = "list"


class ListsUnlessTold(TyperGroup):
    """Command group that reads ``rlwatch alerts RUN`` as ``rlwatch alerts list RUN``, unless RUN is the name of a
    command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of ``rlwatch alerts``, after inserting ``list`` in front if they name no command."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [LIST, *args])


group = typer.Typer(
    cls=ListsUnlessTold,
    help="List alerts and incidents, acknowledge, snooze and silence them, retry deliveries, test a channel.",
    epilog=examples("rlwatch alerts", "rlwatch alerts math-7b-s3", "rlwatch alerts list --format json"),
)
group.command(LIST, epilog=EPILOG)(alerts)
group.command("ack", epilog=ACK)(ack)
group.command("incidents", epilog=INCIDENTS)(incidents)
group.command("snooze", epilog=SNOOZE)(snooze)
group.command("note", epilog=NOTE)(note)
group.command("silence", epilog=SILENCE)(silence)
group.command("silences", epilog=SILENCES)(silences)
group.command("unsilence", epilog=UNSILENCE)(unsilence)
group.command("test", epilog=TEST)(trial)
group.command("dead", epilog=DEAD)(dead)
group.command("retry", epilog=RETRY)(retry)
