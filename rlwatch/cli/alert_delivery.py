"""``rlwatch alerts test | dead | retry``: does a channel work, what never arrived, and sending it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import Cell, print_json, print_table, say
from rlwatch.cli.delivery import deliver_once
from rlwatch.cli.lookup import find_run
from rlwatch.cli.options import ConfigOption, Format, FormatOption, StoreOption, examples
from rlwatch.cli.stores import opened
from rlwatch.cli.strict_json import plain
from rlwatch.cli.wording import age, clean, one_line
from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, OutboxMessage, OutboxStatus

if TYPE_CHECKING:
    from rlwatch.alerts.trial import Trial

TEST = examples("rlwatch alerts test", "rlwatch alerts test --channel slack")
DEAD = examples("rlwatch alerts dead", "rlwatch alerts dead math-7b-s3 --format json")
RETRY = examples("rlwatch alerts retry 5d1e9a", "rlwatch alerts retry --all")


def trial(
    channel: Annotated[
        str, typer.Option("--channel", metavar="NAME", help="Only this one.", show_default="all but the console")
    ] = "",
    config: ConfigOption = None,
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Send one trial message to each channel, on the way alerts take, and say what its receiver answered.

    Exit code 0: all took it; 1: one did not.
    """
    from rlwatch.alerts.config import build_notifiers, load_config
    from rlwatch.alerts.trial import try_channels

    with opened(store) as place:
        loaded = load_config(config, store_root=getattr(place, "root", None))
    if channel and channel not in loaded.channel_names:
        raise ConfigError(f"there is no channel {channel!r}; there are {', '.join(loaded.channel_names)}")
    built = build_notifiers(loaded, console=channel == "console")
    chosen = {name: notifier for name, notifier in built.items() if channel in ("", name)}
    if not chosen:
        raise ConfigError("there is no channel to try: add [notify.NAME] to rlwatch.toml or set RLWATCH_WEBHOOK_URL")
    trials = try_channels(chosen, dashboard_url=loaded.dashboard_url)
    _show(trials, output)
    if not all(trial.delivery.ok for trial in trials):
        raise typer.Exit(1)


def dead(
    run: Annotated[str | None, typer.Argument(help="Only of this run: id, name or unambiguous prefix.")] = None,
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List the messages that were given up, with the reason; rlwatch alerts retry sends them again."""
    with opened(store) as source:
        run_id = None if run is None else find_run(source, run).run_id
        given_up = [message for message in source.outbox(run_id) if message.status is OutboxStatus.DEAD]
    rows = [_row(message) for message in given_up]
    if output is Format.JSON:
        print_json(rows)
    elif not rows:
        say("no message was given up")
    else:
        print_table(("message", "channel", "run", "event", "what", ">tries", "written", "why"), map(_cells, rows))


def retry(
    message: Annotated[
        str, typer.Argument(metavar="[MESSAGE]", help="Its id, or how that begins; see rlwatch alerts dead.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All that were given up.")] = False,
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Send messages that were given up again, now, under the same id; what fails again waits as new ones do."""
    from rlwatch.cli.config_file import alerting_of

    if bool(message) == everything:
        raise ConfigError("name one message, or give --all")
    with opened(store) as target:
        chosen = _chosen(target.outbox(), message)
        alerting = alerting_of(config, target)
        for each in chosen:
            target.retry_message(each)
        said = deliver_once(target, alerting) if chosen else ""
    elsewhere = sorted({each.channel for each in chosen} - set(alerting.notifiers))
    say(f"{len(chosen)} to be sent again" + (f": {said}" if said else ""))
    if elsewhere:
        say(f"not configured here, so left to a process that has it: {', '.join(map(clean, elsewhere))}", style="dim")


def _chosen(outbox: list[OutboxMessage], beginning: str) -> list[OutboxMessage]:
    """Dead ones; or the one whose id begins so, if it is not sent. Raises ``ConfigError``."""
    if not beginning:
        return [message for message in outbox if message.status is OutboxStatus.DEAD]
    found = [message for message in outbox if message.message_id.startswith(beginning)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} messages have an id that begins with {beginning!r}")
    if found[0].status is OutboxStatus.SENT:
        raise ConfigError(f"message {found[0].message_id} was delivered; it is not sent again")
    return found


def _row(message: OutboxMessage) -> dict[str, JSON]:
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


def _cells(row: dict[str, JSON]) -> list[Cell]:
    written = f"{age(SystemClock().now() - row['created_at'])} ago"
    what = [one_line(str(row[key] or ""), 40) for key in ("channel", "run_id", "event", "kind")]
    return [row["message_id"][:12], *what, str(row["attempts"]), written, one_line(row["last_error"], 80)]


def _show(trials: list[Trial], output: Format) -> None:
    if output is Format.JSON:
        print_json(
            [plain(trial.delivery) | {"channel": trial.channel, "message_id": trial.message_id} for trial in trials]
        )
        return
    words = {True: ("delivered", "green"), False: ("failed", "bold red")}
    rows: list[list[Cell]] = [
        [t.channel, words[t.delivery.ok], one_line(t.delivery.reason, 100), t.message_id] for t in trials
    ]
    print_table(("channel", "", "answer", "message"), rows)
