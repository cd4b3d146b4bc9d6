"""``rlwatch audit``: who did what to which run, and when."""

from __future__ import annotations

from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.options import FormatOption, OutputFormat, StoreOption, examples, opened
from rlwatch.clock import SystemClock
from rlwatch.wording import local_moment

EPILOG = examples("rlwatch audit", "rlwatch audit math-7b-s3", "rlwatch audit --by ann --since 7d --format json")


def audit(
    run: Annotated[str | None, typer.Argument(help="Only this run: id, name or unique prefix.")] = None,
    *,
    by: Annotated[str, typer.Option("--by", metavar="NAME", help="Only acts of this person.")] = "",
    act: Annotated[
        list[str] | None,
        typer.Option("--act", help="Only these acts: command, acknowledge, silence, note, edit, ... Repeatable."),
    ] = None,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="Only the last 2h, 7d, ...")] = "",
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List user actions, oldest first: commands, acknowledgements, silences, notes, edits, prunings, purges."""
    from rlwatch.alerts.silencing import seconds_of
    from rlwatch.analysis.lookup import find_run
    from rlwatch.curation.audit import acts_of_people

    after = SystemClock().now() - seconds_of(since) if since else float("-inf")
    with opened(store) as source:
        found = acts_of_people(source, None if run is None else find_run(source, run).run_id)
    found = [
        entry for entry in found if entry.at >= after and (not by or entry.by == by) and (not act or entry.act in act)
    ]
    if output is OutputFormat.JSON:
        print_json(found)
    elif found:
        rows = [(local_moment(entry.at), entry.by, entry.act, entry.run_id, entry.text) for entry in found]
        print_table(("when", "who", "act", "run", "what"), rows)
    else:
        say("no recorded acts")
