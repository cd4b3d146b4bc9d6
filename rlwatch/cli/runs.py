"""``rlwatch runs | edit | purge | audit``: list, edit and remove the runs of a store, and list user actions on them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.analysis.rows import KEY_METRICS, describe, key_values
from rlwatch.cli.console import SEVERITY_STYLES, Cell, cell_of, print_json, print_table, print_text
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.clock import SystemClock
from rlwatch.columns import RUNS, heads
from rlwatch.errors import ConfigError, ControlUnavailableError, RLWatchError
from rlwatch.ports import Store
from rlwatch.records import JSON, AuditEntry, Command, Purge, RunEdit, Severity
from rlwatch.wording import duration, local_moment, meant, one_line, plural

if TYPE_CHECKING:
    from rlwatch.ports import Store
    from rlwatch.records import RunEdit, RunInfo

EPILOG = examples(
    "rlwatch runs",
    "rlwatch runs --project math-rl --limit 10",
    "rlwatch runs --tag paper --search 'lr=3e-5 -ablation'",
    "rlwatch runs --format json | jq -r '.runs[] | select(.status == \"dead\") | .run_id'",
)

LONGEST_NAME = 40


def runs(
    *,
    store: StoreOption = None,
    project: Annotated[str | None, typer.Option("--project", help="Only runs of this project.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only runs with this tag. Repeatable.")] = None,
    search: Annotated[
        str,
        typer.Option(
            "--search",
            metavar="QUERY",
            help="Only matching runs: words of id, name, tags, notes or config, and settings such as lr=3e-5, beta>0, "
            "model~qwen; all must match, a leading - negates.",
        ),
    ] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Include archived runs.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Show deleted runs instead.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum number of runs; 0: all.")] = 0,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """List the runs of a store, newest first: status, last step, last values."""
    from rlwatch.curation.search import matching

    now = time.time()
    with opened(store) as source:
        every = source.runs(deleted=deleted)
        found = [
            run
            for run in matching(every, search)
            if (project is None or run.project == project)
            and set(tag or ()) <= set(run.tags)
            and (archived or deleted or not run.curation.archived)
        ]
        rows = [describe(source, run, now) for run in (found[:limit] if limit else found)]
        unreadable = dict(source.unreadable())
    if output is OutputFormat.JSON:
        print_json({"runs": rows, "unreadable": unreadable})
        return
    if rows:
        tags = ["tags"] if any(row["tags"] for row in rows) else []
        names = ("status", "verdict", "project", "name", *tags, "run_id", "last_step", *KEY_METRICS, "age_s")
        print_table(heads(RUNS, names), [_cells(row, names) for row in rows])
    elif not unreadable:
        asked = {"in project": project, "with tag": ", ".join(tag or ()), "matching": search}
        given = [f"{word} {value!r}" for word, value in asked.items() if value]
        hint = meant(project, dict.fromkeys(run.project for run in every)) if project else ""
        what = " ".join(["no deleted runs" if deleted else "no runs", *given])
        print_text(what + hint if given or deleted else "no runs yet")
    for name, reason in unreadable.items():
        print_text(f"unreadable: {name}: {reason}", style="yellow")


def _verdict_cell(verdict: Mapping[str, JSON]) -> Cell:
    """Return the verdict in a word or two."""
    urgency = verdict["urgency"]
    return (verdict["name"], "green" if urgency is None else SEVERITY_STYLES[Severity(urgency)])


def _cells(row: dict[str, JSON], names: Sequence[str]) -> list[Cell]:
    values = row | key_values(row["last_values"]) | {"tags": ", ".join(row["tags"])}
    cells = {name: cell_of(RUNS[name], values[name]) for name in names if name != "verdict"}
    cells["verdict"] = _verdict_cell(row["verdict"])
    cells |= {name: one_line(values[name] or "-" * (name == "name"), LONGEST_NAME) for name in ("name", "tags")}
    return [cells[name] for name in names]


# ``rlwatch edit`` and ``rlwatch purge``: edit the annotations of runs, and remove the data of deleted runs.

EDIT_EPILOG = examples(
    "rlwatch edit math-7b-s3 --name 'best so far' --tag paper --tag seeds",
    "rlwatch edit math-7b-s3 --note 'entropy bonus 0.01; see the plan of May'",
    "rlwatch edit math-7b-s1 math-7b-s2 --archive",
    "rlwatch edit math-7b-s1 --delete     # hidden; --restore brings it back",
    "rlwatch edit math-7b-s3 --history",
)
PURGE_EPILOG = examples(
    "rlwatch purge                        # what could go: nothing is removed",
    "rlwatch purge --yes",
    "rlwatch purge math-7b-s1 --grace 0m --yes",
)


def edit(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs: id, name or unique prefix.")],
    *,
    name: Annotated[
        str | None, typer.Option("--name", help="Display name; '' restores the name from the trainer.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Add a tag. Repeatable.")] = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", help="Remove a tag, including tags from the trainer.")
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="Replace the notes; '' removes them.")] = None,
    archive: Annotated[
        bool | None, typer.Option("--archive/--unarchive", help="Hide the run from lists, or show it again.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Hide the run everywhere until it is restored or purged.")
    ] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Undo --delete.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Print the edit history.")] = False,
    by: ByOption = "",
    store: StoreOption = None,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Name, tag and annotate runs; archive, delete and restore them. Recorded data stay unchanged."""
    from rlwatch.curation import edit_run

    if delete and restore:
        raise ConfigError("give either --delete or --restore")
    if name is not None and len(runs) > 1:
        raise ConfigError(f"--name takes one run, got {len(runs)}: runs with one name cannot be distinguished")
    deleted = True if delete else False if restore else None
    has_changes = any(value is not None for value in (name, tag, untag, note, archive, deleted))
    if not has_changes and not history:
        raise ConfigError("nothing to change: give --name, --tag, --untag, --note, --archive, --delete or --restore")
    change = partial(
        edit_run,
        by=by or me(),
        name=name,
        notes=note,
        tag=tag or (),
        untag=untag or (),
        archived=archive,
        deleted=deleted,
    )
    with opened(store) as target:
        found = [_any_run(target, run).run_id for run in dict.fromkeys(runs)]
        shown = [change(target, run_id) if has_changes else target.run(run_id) for run_id in found]
        edits = [edit for run_id in found for edit in target.edits(run_id)] if history else []
    if output is OutputFormat.JSON:
        print_json(edits if history else [_edited_row(run) for run in shown])
    elif history:
        _print_history(edits)
    else:
        for run in shown:
            print_text(_line(run))


def _any_run(store: Store, reference: str) -> RunInfo:
    """Return the run, deleted or not; one that is not deleted takes precedence."""
    hidden = store.runs(deleted=True)
    try:
        return find_run(store, reference)
    except RLWatchError:
        fitting = [run for run in hidden if reference in (run.run_id, run.name)]
        if len(fitting) != 1:
            raise
        return fitting[0]


def _edited_row(run: RunInfo) -> dict[str, object]:
    curation = run.curation
    return {
        "run_id": run.run_id,
        "name": run.name,
        "tags": run.tags,
        "notes": curation.notes,
        "archived": curation.archived,
        "deleted_at": curation.deleted_at,
        "deleted_by": curation.deleted_by,
        "logged_name": curation.logged_name,
        "logged_tags": curation.logged_tags,
    }


def _line(run: RunInfo) -> str:
    curation = run.curation
    parts = [run.run_id, one_line(run.name or "no name", 80)]
    parts += [f"tags {', '.join(run.tags)}"] if run.tags else []
    parts += [f"notes {one_line(curation.notes, 80)}"] if curation.notes else []
    parts += ["archived"] if curation.archived else []
    parts += (
        [f"deleted by {curation.deleted_by}: rlwatch edit {run.run_id} --restore undoes it"] if curation.deleted else []
    )
    return " · ".join(parts)


def _print_history(edits: list[RunEdit]) -> None:
    if not edits:
        print_text("no edits")
        return
    print_table(("when", "who", "run", "what"), [(local_moment(e.at), e.by, e.run_id, _what(e)) for e in edits])


def _what(edit: RunEdit) -> str:
    """Describe the change: ``name best; +paper; archived``."""
    parts = [] if edit.name is None else [f"name {one_line(edit.name, 60)}" if edit.name else "the trainer's name"]
    parts += [f"+{tag}" for tag in edit.tagged] + [f"-{tag}" for tag in edit.untagged]
    parts += [] if edit.notes is None else [f"notes {one_line(edit.notes, 60)}" if edit.notes else "no notes"]
    words = {"archived": ("archived", "no longer archived"), "deleted": ("deleted", "restored")}
    parts += [yes if getattr(edit, key) else no for key, (yes, no) in words.items() if getattr(edit, key) is not None]
    return "; ".join(parts)


def purge(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids of deleted runs to purge (default: all).")
    ] = None,
    *,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Keep runs deleted within this time: 90m, 2h, 30d.")
    ] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="Remove the runs; without it, only list them.")] = False,
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Remove the data of deleted runs permanently after a grace period; lists them first without removing."""
    from rlwatch.alerts.silencing import seconds_of
    from rlwatch.curation import purge_run

    grace_s, now = seconds_of(grace), SystemClock().now()
    with opened(store) as target:
        found = target.runs(deleted=True)
        unknown = set(runs or ()) - {run.run_id for run in found}
        if unknown:
            raise ConfigError(f"not deleted, so not purged: {', '.join(sorted(unknown))}; see rlwatch runs --deleted")
        due = [
            run
            for run in found
            if (not runs or run.run_id in runs) and now - (run.curation.deleted_at or now) >= grace_s
        ]
        for run in due:
            since = duration(now - (run.curation.deleted_at or now))
            if yes:
                purge_run(target, run.run_id, by=by or me(), grace_s=grace_s)
            print_text(
                f"{'removed' if yes else 'to remove'}: {run.run_id}, deleted {since} ago by {run.curation.deleted_by}"
            )
    kept = len(found) - len(due)
    if not due or kept:
        print_text(f"{plural(kept, 'deleted run')} left" if kept else "no deleted runs")
    if due and not yes:
        print_text("nothing removed: add --yes")


# ``rlwatch audit``: who did what to which run, and when.

# The actions of users on the runs of a store, in one list.


_PINS = "pin"
"""Prefix of acts on a user's own view of the dashboard, which change nothing for other users."""


def acts_of_people(store: Store, run_id: str | None = None) -> list[AuditEntry]:
    """Return user actions (notes, acknowledgements, silences, prunings, commands, edits, purges), oldest first.

    Parameters
    ----------
    store
        The store to read.
    run_id
        The run; None for all runs.

    Raises
    ------
    StoreError
        If the run, or the store, cannot be read.
    """
    runs = [store.run(run_id)] if run_id is not None else [*store.runs(), *store.runs(deleted=True)]
    found = [entry for entry in store.audit(run_id) if not entry.act.startswith(_PINS)]
    for run in runs:
        found += [_edit(edit) for edit in store.edits(run.run_id)]
        try:
            found += [_command(command) for command in store.commands(run.run_id)]
        except ControlUnavailableError:
            continue  # a store without commands
    found += [_purge(purge) for purge in store.purges() if run_id in (None, purge.run_id)]
    return sorted(found, key=lambda entry: entry.at)


def _command(command: Command) -> AuditEntry:
    args = f" {json.dumps(command.args, default=str)}" if command.args else ""
    parts = [f"{command.kind}{args}{', by force' if command.force else ''}", command.why, command.status.value]
    text = "; ".join(filter(None, (*parts, command.result)))
    who = command.requested_by or "nobody named"
    return AuditEntry(command.command_id, command.created_at, who, "command", one_line(text, 400), command.run_id)


def _edit(edit: RunEdit) -> AuditEntry:
    changes = {
        "name": edit.name,
        "notes": edit.notes,
        "tagged": ", ".join(edit.tagged) or None,
        "untagged": ", ".join(edit.untagged) or None,
        "archived": edit.archived,
        "deleted": edit.deleted,
    }
    parts = [f"{name}: {_word(value)}" for name, value in changes.items() if value is not None]
    text = "; ".join(parts)
    return AuditEntry(f"edit-{edit.run_id}-{edit.at}", edit.at, edit.by, "edit", one_line(text, 400), edit.run_id)


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"


def _purge(purge: Purge) -> AuditEntry:
    text = f"removed {purge.name or purge.run_id} of {purge.project} for good; deleted by {purge.deleted_by}"
    return AuditEntry(
        f"purge-{purge.run_id}-{purge.at}", purge.at, purge.by, "purge", one_line(text, 400), purge.run_id
    )


# ``rlwatch audit``: who did what to which run, and when.


AUDIT_EPILOG = examples("rlwatch audit", "rlwatch audit math-7b-s3", "rlwatch audit --by ann --since 7d --format json")


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
    from rlwatch.cli.runs import acts_of_people

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
        print_text("no recorded acts")
