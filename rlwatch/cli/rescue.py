"""``rlwatch rescue``: try a rescue policy on a recorded run, and list the actions that one took on a live run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import print_json, print_table, print_text
from rlwatch.cli.options import ConfigOption, FormatOption, OutputFormat, StoreOption, configured, examples, opened
from rlwatch.records import JSON, Event, RunInfo, StepRecord
from rlwatch.wording import cell, number, one_line, plural, step

if TYPE_CHECKING:
    from rlwatch.monitor.rescue_rehearsal import RescueRehearsal
    from rlwatch.ports import Store

REHEARSE_EPILOG = examples(
    "rlwatch rescue rehearse math-7b-s3", "rlwatch rescue rehearse math-7b-s3 --every 20 --format json"
)
LEDGER_EPILOG = examples("rlwatch rescue ledger math-7b-s3", "rlwatch rescue ledger math-7b-s3 --format json")


def rehearse(
    run: Annotated[str, typer.Argument(help="Run: id, name or unique prefix.")],
    *,
    every: Annotated[
        int, typer.Option("--every", min=1, metavar="STEPS", help="Steps between two snapshots that are assumed.")
    ] = 10,
    config: ConfigOption = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show what [[rescue]] of rlwatch.toml, or its defaults, would have done to a recorded run.

    The rows of the probe went on being trained in the recording, and what restored weights would have earned is not
    known. So the rehearsal ends with the first act that would have changed the run.
    """
    from rlwatch.analysis.lookup import find_run
    from rlwatch.control.rescue import RescuePolicy
    from rlwatch.monitor.engine import Monitor
    from rlwatch.monitor.forecasting import forecaster_for
    from rlwatch.monitor.rescue_rehearsal import rehearse_rescue
    from rlwatch.run.alerting import rescue_of

    loaded = configured(config)
    policy = rescue_of(loaded) or RescuePolicy()
    with opened(store) as source:
        info = find_run(source, run)
        monitor = Monitor(
            run_id=info.run_id,
            source=info.source,
            rules=loaded.policy.rules,
            forecaster=forecaster_for(wanted=False),
        )
        found = rehearse_rescue(_items(source, info), monitor, policy, every=every)
    if output is OutputFormat.JSON:
        print_json({"run_id": info.run_id, **asdict(found), "wasted": found.wasted})
    else:
        _print(info, found)


def _items(source: Store, info: RunInfo) -> Iterator[StepRecord | Event]:
    after = 0
    while found := source.stream(info.run_id, after_seq=after, limit=ROWS_AT_ONCE):
        yield from (item for item in found if item.attempt == info.attempt)
        after = found[-1].seq


ROWS_AT_ONCE = 1000
"""Number of rows that are read from the store at a time."""


def _print(info: RunInfo, found: RescueRehearsal) -> None:
    if not found.acts:
        print_text(f"{info.name or info.run_id}: no rescue would have begun")
        return
    rows = [(step(act.step), act.do, _arguments(act.args), act.why) for act in found.acts]
    print_table((">step", "command", "with", "why"), rows)
    if found.restored is not None:
        print_text(
            f"restored: the snapshot of step {found.restored}; whether the reward comes back, a recording does not show"
        )
        print_text(
            "  if it does: the cause is removed and updates go on; if not: updates stay held and a person is needed"
        )
    if found.steps_after:
        ended = f"; its reward ended at {number(found.ended)}, {number(found.level)} before" if found.level else ""
        time = f" ({found.hours_after:.1f} h)" if found.hours_after >= 0.05 else ""
        print_text(f"without it the run went on for {plural(found.steps_after, 'step')}{time}{ended}")


def ledger(
    run: Annotated[str, typer.Argument(help="Run: id, name or unique prefix.")],
    *,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List what a permitted policy did to a run, or would have done in a dry run: step, stage, why, evidence."""
    from rlwatch.analysis.lookup import find_run
    from rlwatch.control.rescue import RESCUE_EVENT

    with opened(store) as source:
        info = find_run(source, run)
        events = [event for event in source.events(info.run_id) if _is_of_a_rescue(event, RESCUE_EVENT)]
    entries = [_entry(event) for event in events]
    if output is OutputFormat.JSON:
        print_json(entries)
    elif entries:
        columns = ("step", "what", "why", "evidence")
        rows = [tuple(one_line(str(entry[name]), LONGEST) for name in columns) for entry in entries]
        print_table((">step", *columns[1:]), rows)
    else:
        print_text(f"{info.name or info.run_id}: no rescue began")


LONGEST = 80
"""Most characters of a table cell; ``--format json`` has all of them."""


def _is_of_a_rescue(event: Event, kind: str) -> bool:
    from rlwatch.control.policy import REQUESTED_BY

    return event.kind == kind or (event.kind == "command" and str(event.body.get("by", "")).startswith(REQUESTED_BY))


def _entry(event: Event) -> dict[str, JSON]:
    body = event.body
    if event.kind == "command":
        report = body.get("report")
        evidence = report.get("summary", "") if isinstance(report, dict) else ""
        what: JSON = f"{body.get('command')} {_arguments(body.get('args'))}".strip()
        return {"step": event.step, "what": what, "why": body.get("why", ""), "evidence": evidence}
    dry = " (dry run)" if body.get("outcome") == "dry run" else ""
    what = f"{body.get('stage')}{dry}"
    return {"step": event.step, "what": what, "why": body.get("why", ""), "evidence": _arguments(body.get("evidence"))}


def _arguments(given: JSON) -> str:
    if not isinstance(given, dict):
        return ""
    return " ".join(f"{name}={_value(value)}" for name, value in given.items() if value is not None)


def _value(value: JSON) -> str:
    return ",".join(map(cell, value)) if isinstance(value, list) else cell(value)


group = typer.Typer(
    help="Rescues by a permitted policy: rehearse one on a recorded run, list what one did.",
    no_args_is_help=True,
    epilog=examples("rlwatch rescue rehearse math-7b-s3", "rlwatch rescue ledger math-7b-s3"),
)
group.command("rehearse", epilog=REHEARSE_EPILOG)(rehearse)
group.command("ledger", epilog=LEDGER_EPILOG)(ledger)
