"""``rlwatch alerts ack | silence | silences | unsilence``: what people do about alerts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from rlwatch.cli.console import Cell, print_json, print_table, say
from rlwatch.cli.options import Format, FormatOption, StoreOption, examples
from rlwatch.cli.stores import opened
from rlwatch.cli.strict_json import plain
from rlwatch.cli.wording import age, one_line, step
from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError
from rlwatch.records import Silence

ByOption = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Who does it, for those who ask later.", show_default="you@host")
]
ACK = examples("rlwatch alerts ack 3f2a9c", "rlwatch alerts ack 3f2a9c --by ann --why 'rolled back to step 400'")
SILENCE = examples(
    "rlwatch alerts silence --run math-7b-s3 --for 2h --why 'new data, expected'",
    "rlwatch alerts silence --kind grad_spike --label team=rl --for 1d --why 'clipping is being tuned'",
    "rlwatch alerts silence --all --until 2026-12-24T18:00 --why 'the cluster is down'",
)
SILENCES = examples("rlwatch alerts silences", "rlwatch alerts silences --over")
UNSILENCE = examples("rlwatch alerts unsilence 5d1e")


def ack(
    alert: Annotated[str, typer.Argument(metavar="ALERT", help="Its id, or how that begins; see rlwatch alerts.")],
    by: ByOption = "",
    why: Annotated[str, typer.Option("--why", help="What you are doing about it.")] = "",
    store: StoreOption = None,
) -> None:
    """Take a firing alert on: no repeats and no escalation any more, unless it gets worse. Its end is still told."""
    from rlwatch.alerts.people import acknowledge, find_alert

    with opened(store) as target:
        found = find_alert(target.alerts(), alert)
        kept = acknowledge(target, found, by=by or _me(), why=why)
    whose = f"{found.kind} on {found.run_id} since step {step(found.onset_step)}"
    before = "" if kept.by == (by or _me()).strip() else ", who had it already"
    say(f"{found.alert_id}: {whose}: acknowledged by {kept.by}{before}")


def silence(
    *,
    run: Annotated[str, typer.Option("--run", help="Only of this run: its id or name, exactly.")] = "",
    project: Annotated[str, typer.Option("--project", help="Only of runs of this project.")] = "",
    kind: Annotated[str, typer.Option("--kind", help="Only of this kind, as in entropy_collapse.")] = "",
    rule: Annotated[str, typer.Option("--rule", help="Only of this rule.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Only of rules with this label.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of everything in this store.")] = False,
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="For so long: 90m, 2h, 1d12h.")] = "",
    until: Annotated[str, typer.Option("--until", metavar="WHEN", help="Or until then: 2026-12-24T18:00.")] = "",
    by: ByOption = "",
    why: Annotated[str, typer.Option("--why", help="The reason; it is shown wherever an alert is missing.")] = "",
    store: StoreOption = None,
) -> None:
    """Tell nobody of alerts that fit all that is given, until it is over; what still fires then is told then."""
    from rlwatch.alerts import people
    from rlwatch.alerts.kinds import builtin_kinds

    for_s = _length(duration, until, SystemClock().now())
    labels = _labels(label or [])
    with opened(store) as target:
        fresh = people.silence(
            target,
            by=by or _me(),
            why=why,
            for_s=for_s,
            run=run,
            project=project,
            kind=kind,
            rule=rule,
            labels=labels,
            everything=everything,
        )
    say(f"{fresh.silence_id}: {matchers(fresh)} silenced until {_moment(fresh.until)}")
    if kind and kind not in builtin_kinds():
        say(f"no shipped detector reports the kind {kind!r}", style="yellow")


def silences(
    over: Annotated[bool, typer.Option("--over", help="Also those that are over.")] = False,
    store: StoreOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """List silences, newest last."""
    now = SystemClock().now()
    with opened(store) as source:
        found = [each for each in source.silences() if over or each.until > now]
    if output is Format.JSON:
        print_json([dict(plain(each)) | {"over": each.until <= now} for each in found])
    elif not found:
        say("no silences")
    else:
        print_table(("id", "what", "until", ">left", "by", "why"), [_row(each, now) for each in found])


def unsilence(
    silence_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, or how that begins.")],
    store: StoreOption = None,
) -> None:
    """End a silence now; alerts it kept back are told if they still fire."""
    from rlwatch.alerts.people import end_silence

    with opened(store) as target:
        ended = end_silence(target, silence_id)
    say(f"{ended.silence_id}: {matchers(ended)} is told again")


def matchers(silence: Silence) -> str:
    """What it is about: ``run seed3, kind kl_drift``."""
    keys = ("run", "project", "kind", "rule")
    found = [f"{key} {getattr(silence, key)}" for key in keys if getattr(silence, key)]
    return ", ".join([*found, *(f"label {key}={value}" for key, value in silence.labels.items())]) or "everything"


def _row(silence: Silence, now: float) -> list[Cell]:
    left: Cell = age(silence.until - now) if silence.until > now else ("over", "dim")
    return [
        silence.silence_id,
        matchers(silence),
        _moment(silence.until),
        left,
        silence.by,
        one_line(silence.why, 80),
    ]


def _length(duration: str, until: str, now: float) -> float:
    from rlwatch.alerts.durations import seconds_of

    if bool(duration) == bool(until):
        raise ConfigError("say how long the silence lasts: either --for 2h or --until 2026-12-24T18:00")
    if duration:
        return seconds_of(duration)
    try:
        end = datetime.fromisoformat(until).timestamp()
    except ValueError:
        raise ConfigError(f"--until {until!r} is no time; give one as in 2026-12-24T18:00 (local time)") from None
    if end <= now:
        raise ConfigError(f"--until {until} is in the past")
    return end - now


def _labels(given: list[str]) -> dict[str, str]:
    wrong = [text for text in given if "=" not in text or text.startswith("=")]
    if wrong:
        raise ConfigError(f"--label {wrong[0]!r} is not KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in given)}


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def _me() -> str:
    from rlwatch.control.request import whoami

    return whoami()
