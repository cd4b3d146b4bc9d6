"""``rlwatch forecast record | judge``: what past forecasts of a store said and what came of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import Cell, plain, print_json, print_table, say
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.clock import SystemClock
from rlwatch.errors import StoreError
from rlwatch.records import JSON
from rlwatch.wording import NOTHING, chance, one_line, plural, step

if TYPE_CHECKING:
    from rlwatch.forecast.record import Bin, Past, Record
    from rlwatch.ports import Store

RECORD = examples("rlwatch forecast record", "rlwatch forecast record math-7b-s3 --format json")
JUDGE = examples(
    "rlwatch forecast judge math-7b-s3 4690 --right --why 'entropy collapsed at 4730'",
    "rlwatch forecast judge math-7b-s3 1200 --wrong --why 'a harmless dip'",
)


def record(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Show past forecast alarms with their outcome, missed failures, and the calibration.

    An alarm is true if a failure (by labels-v3) began within 50 steps of it. Steps with an open horizon and steps
    after a failure are not counted.
    """
    with opened(store) as source:
        found = _record(source, run)
    if output is OutputFormat.JSON:
        print_json(record_row(found))
        return
    if not found.runs:
        say("no forecasts yet")
        return
    if found.past:
        print_table((">step", "run", "what", ">highest", ">lead", "answer"), [_cells(past) for past in found.past])
    say(record_words(found))
    if found.curve:
        print_table((">predicted", ">observed", ">steps", ">runs"), [_bin_cells(each) for each in found.curve])


def judge(
    run: Annotated[str, typer.Argument(help="Id, name or unique prefix.")],
    at: Annotated[int, typer.Argument(metavar="STEP", help="Step of the alarm or of the failure.")],
    *,
    right: Annotated[bool, typer.Option("--right/--wrong", help="Whether the run failed.")],
    why: Annotated[str, typer.Option("--why", help="Reason, kept with the record.")] = "",
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Record whether a forecast was right; rlwatch forecast calibrate uses it."""
    from rlwatch.forecast.record import answer, find_past, record_of_run

    with opened(store) as target:
        info = find_run(target, run)
        past = find_past(record_of_run(target, info), at)
        said = answer(target, past, right=right, by=by or me(), why=why, now=SystemClock().now())
    say(f"{info.run_id}: the forecast at step {step(said.step)} was {'right' if said.right else 'wrong'}, by {said.by}")


def _record(store: Store, run: str | None) -> Record:
    from rlwatch.forecast.record import gathered, record_of_run

    records = []
    for info in [find_run(store, run)] if run is not None else store.runs():
        try:
            records.append(record_of_run(store, info))
        except StoreError as error:
            say(f"{info.run_id} skipped: {error}", style="yellow")
    return gathered(each for each in records if each is not None)


def record_row(found: Record) -> dict[str, JSON]:
    """The record as plain values."""
    past = [plain(asdict(each)) | {"lead": each.lead, "right": each.right} for each in found.past]
    return {"runs": found.runs, "steps": found.steps, "past": past, "curve": [asdict(each) for each in found.curve]}


def record_words(found: Record) -> str:
    """Counts of what came of the alarms, and how early those that came true were, in a line."""
    from rlwatch.forecast.record import Came

    counts = [f"{found.count(came)} {came}" for came in Came if found.count(came)]
    median = found.leads[len(found.leads) // 2] if found.leads else None
    lead = "" if median is None else f"; median lead {plural(median, 'step')}"
    said = plural(sum(past.answer is not None for past in found.past), "answer")
    return f"{', '.join(counts) or 'no alarm'} in {plural(found.runs, 'run')} with forecasts{lead}; {said} by people"


def _cells(past: Past) -> list[Cell]:
    said = past.answer
    words = "" if said is None else f"{'right' if said.right else 'wrong'}, {said.by}: {one_line(said.why, 60)}"
    return [
        step(past.step),
        past.run_id,
        past.came.value + (f" ({past.type} at {step(past.onset)})" if past.onset is not None and past.type else ""),
        NOTHING if past.p50 is None else chance(past.p50),
        NOTHING if past.lead is None else step(past.lead),
        words,
    ]


def _bin_cells(each: Bin) -> list[Cell]:
    return [chance(each.said), chance(each.came), step(each.steps), step(each.runs)]
