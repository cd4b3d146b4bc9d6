"""``rlwatch edit`` and ``rlwatch purge``: edit the annotations of runs, and remove the data of deleted runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me, opened
from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.wording import duration, local_moment, one_line, plural

if TYPE_CHECKING:
    from rlwatch.ports import Store
    from rlwatch.records import RunEdit, RunInfo

EPILOG = examples(
    "rlwatch edit math-7b-s3 --name 'best so far' --tag paper --tag seeds",
    "rlwatch edit math-7b-s3 --note 'entropy bonus 0.01; see the plan of May'",
    "rlwatch edit math-7b-s1 math-7b-s2 --archive",
    "rlwatch edit math-7b-s1 --delete     # hidden; --restore brings it back",
    "rlwatch edit math-7b-s3 --history",
)
PURGE = examples(
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
        print_json(edits if history else [_row(run) for run in shown])
    elif history:
        _print_history(edits)
    else:
        for run in shown:
            say(_line(run))


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


def _row(run: RunInfo) -> dict[str, object]:
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
        say("no edits")
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
            say(f"{'removed' if yes else 'to remove'}: {run.run_id}, deleted {since} ago by {run.curation.deleted_by}")
    kept = len(found) - len(due)
    if not due or kept:
        say(f"{plural(kept, 'deleted run')} left" if kept else "no deleted runs")
    if due and not yes:
        say("nothing removed: add --yes")
