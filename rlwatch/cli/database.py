"""``rlwatch db`` and ``rlwatch sync``: maintenance of a store (check, copy, measure, prune, create tables)."""

from __future__ import annotations

from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.progress import Progress, TaskID, track

from rlwatch.cli.console import errors, print_table, print_text
from rlwatch.cli.options import ByOption, ConfigOption, StoreOption, examples, me, opened
from rlwatch.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rlwatch.records import RunInfo
    from rlwatch.store.postgres.server import Server

URL = "postgresql://owner@db.example.com/rlwatch"
group = typer.Typer(
    help="Maintain a store: check, copy, measure and prune it; create tables and roles on PostgreSQL.",
    no_args_is_help=True,
    epilog=examples("rlwatch db check", "rlwatch db stats", f"rlwatch db migrate --store {URL}"),
)
MIGRATE_EPILOG = examples(f"rlwatch db migrate --store {URL}")
SQL_EPILOG = examples(f"rlwatch db sql roles --store {URL} | psql {URL}", "rlwatch db sql citus")
CHECK_EPILOG = examples("rlwatch db check", "rlwatch db check math-7b-s3", f"rlwatch db check --store {URL}")
STATS_EPILOG = examples("rlwatch db stats", f"rlwatch db stats --store {URL}")
PRUNE_EPILOG = examples(
    "rlwatch db prune --older-than 30d --kind tokens --dry-run",
    "rlwatch db prune --older-than 90d --kind completions --kind tokens",
    "rlwatch db prune",
)
COPY_EPILOG = examples(
    f"rlwatch db copy ./rlwatch-runs {URL}", f"rlwatch db copy {URL} ./kept 'math-*'", "rlwatch db copy ./a ./b"
)
SYNC_EPILOG = examples("rlwatch sync", "rlwatch sync /scratch/rlwatch")


class Script(StrEnum):
    """SQL scripts for the administrator of a PostgreSQL store: database roles, or distribution by Citus."""

    ROLES = "roles"
    CITUS = "citus"


@group.command("migrate", epilog=MIGRATE_EPILOG)
def migrate(store: StoreOption = None) -> None:
    """Create or upgrade the tables of a PostgreSQL store. Run it as their owner."""
    from rlwatch.store.postgres import migrations

    server = server_of(store)
    done, newest = server.migrate(), len(migrations.steps())
    print_text(f"{server.address.url}: format {newest}, " + ("made" if done else "nothing to do"))


@group.command("sql", epilog=SQL_EPILOG)
def sql(
    script: Annotated[Script, typer.Argument(help="For roles and row-level security, or for Citus.")],
    store: StoreOption = None,
) -> None:
    """Print SQL for psql: reader, writer and operator roles with row-level security, or distribution by Citus."""
    from rlwatch.store.postgres import migrations

    print(migrations.script(script.value, server_of(store).address.schema))


@group.command("check", epilog=CHECK_EPILOG)
def check(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs: ids, names or prefixes.", show_default="all, including deleted runs"),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Read back every run, compare series with their source rows, and run SQLite's integrity check. Read-only; exit
    code 1 if a run is damaged.
    """
    from rlwatch.analysis.lookup import find_run
    from rlwatch.store.checking import check_run

    with opened(store) as source:
        wrong = {} if runs else dict(source.unreadable())
        wanted = [find_run(source, run).run_id for run in runs or ()]
        wanted = wanted or [run.run_id for run in (*source.runs(), *source.runs(deleted=True))]
        rows = values = 0
        shown = track(wanted, description="reading back", console=errors(), transient=True)
        for run_id in shown if errors().is_terminal else wanted:
            checked = check_run(source, run_id)
            rows, values = rows + checked.rows, values + checked.values
            if checked.problems:
                wrong[run_id] = "; ".join(checked.problems)
    for run_id, why in wrong.items():
        print_text(f"{run_id}: {why}", style="red")
    outcome = f"{len(wrong)} damaged" if wrong else "no damage"
    print_text(f"{len(wanted)} runs read back, {rows:,} rows, {values:,} values: {outcome}")
    if wrong:
        raise typer.Exit(1)


@group.command("stats", epilog=STATS_EPILOG)
def stats(store: StoreOption = None) -> None:
    """Show the disk usage of a store, largest first: by run in a directory, by table on PostgreSQL."""
    with opened(store) as source:
        usage: dict[str, dict[str, int]] | None = source.usage() if hasattr(source, "usage") else None
    if usage is None:
        raise ConfigError("the size of this store is unknown: it is neither a directory nor on PostgreSQL")
    kinds = sorted({kind for each in usage.values() for kind in each})
    largest = sorted(usage.items(), key=lambda item: -sum(item[1].values()))
    table = [
        (name, *(decimal(each.get(kind, 0)) for kind in kinds), decimal(sum(each.values()))) for name, each in largest
    ]
    print_table(["", *(f">{kind}" for kind in kinds), ">together"], table)
    print_text(f"{decimal(sum(sum(each.values()) for each in usage.values()))} together")


@group.command("prune", epilog=PRUNE_EPILOG)
def prune(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs: ids, names or prefixes.", show_default="all"),
    ] = None,
    *,
    older_than: Annotated[str, typer.Option("--older-than", metavar="TIME", help="Minimum age: 2h, 30d.")] = "",
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="tokens, completions or archived (whole runs). Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed without removing it.")] = False,
    by: ByOption = "",
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Remove old token records and completions, and delete old archived runs; without options, by [retention].

    Metrics, findings, alerts and commands stay. Deleted runs can be restored until `rlwatch purge` removes them.
    """
    from rlwatch.alerts.config import load_config
    from rlwatch.alerts.silencing import seconds_of
    from rlwatch.analysis.lookup import find_run
    from rlwatch.curation.editing import KINDS
    from rlwatch.curation.editing import prune as prune_store

    if bool(older_than) != bool(kind):
        raise ConfigError(f"--older-than and --kind ({', '.join(KINDS)}) belong together; without both, [retention]")
    ages = dict.fromkeys(kind or (), seconds_of(older_than)) if older_than else dict(load_config(config).retention)
    if not ages:
        raise ConfigError("say --older-than and --kind, or write [retention] into rlwatch.toml; see docs/storage.md")
    with opened(store) as source:
        wanted = [find_run(source, run).run_id for run in runs or ()]
        done = list(prune_store(source, ages, by=by or me(), runs=wanted, dry_run=dry_run))
    gone = [each for each in done if not each.left]
    if gone:
        rows = [(each.run_id, each.kind, f"{each.n:,}", decimal(each.bytes) if each.bytes else "") for each in gone]
        print_table(["run", "what", ">number", ">size"], rows)
    for each in done:
        if each.left:
            print_text(f"{each.run_id}: {each.kind} left, {each.left}", style="yellow")
    outcome = f"{decimal(sum(each.bytes for each in gone))} {'would be removed' if dry_run else 'removed'}"
    print_text(outcome if gone else "nothing of that age")


@group.command("copy", epilog=COPY_EPILOG)
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The store to copy from: a directory or a URL.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The store to copy to.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Patterns of ids or names, e.g. 'math-*'.", show_default="all, including deleted runs"),
    ] = None,
) -> None:
    """Copy runs with all records and annotations, then compare source and copy. An interrupted copy can be repeated
    and continues. Exit code 1 if a run could not be copied or differs.
    """
    from rlwatch.store.transfer import copy_run, copy_shared

    failed: dict[str, str] = {}
    with opened(source) as ours, opened(target) as theirs:
        if ours.url == theirs.url:
            raise ConfigError(f"source and target are both {ours.url}; give another target")
        wanted = [run.run_id for run in (*ours.runs(), *ours.runs(deleted=True)) if _fits(run, runs)]
        if runs and not wanted:
            raise ConfigError(f"no run matches {' '.join(runs)}; `rlwatch runs` lists what there is")
        failed |= {} if runs else ours.unreadable()
        with Progress(console=errors(), transient=True, disable=not errors().is_terminal) as shown:
            for run_id in wanted[::-1]:  # the oldest first
                task = shown.add_task(run_id, total=ours.judged(run_id)[1])
                try:
                    copied = copy_run(ours, theirs, run_id, partial(_advance, shown, task))
                except StoreError as error:
                    failed[run_id] = str(error)
                    continue
                finally:
                    shown.remove_task(task)
                if copied.differs:
                    failed[run_id] = f"differs in {', '.join(copied.differs)}; copy it again if it is being written"
                rows, others = copied.counts["rows"], sum(copied.counts.values()) - copied.counts["rows"]
                print_text(
                    f"{run_id}: {rows:,} rows ({copied.written:,} new), {others:,} other things, {copied.digest[:12]}"
                )
        copy_shared(ours, theirs)
    for run_id, why in failed.items():
        print_text(f"{run_id}: {why}", style="red")
    print_text(f"{len(wanted)} runs, {len(failed)} of them not copied or not the same")
    if failed:
        raise typer.Exit(1)


def _fits(run: RunInfo, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(word, each) for word in (run.run_id, run.name) for each in patterns)


def _advance(shown: Progress, task: TaskID, upto: int) -> None:
    shown.update(task, completed=upto)


def sync(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Local directory of a trainer, or a parent of it.", show_default="RLWATCH_LOCAL_DIR, else /tmp"
        ),
    ] = None,
) -> None:
    """Send records that killed trainers left on this machine's disk to their PostgreSQL store."""
    from rlwatch.store.postgres.spool import sync as ship_all
    from rlwatch.store.sqlite.shared import local_base

    place = directory or local_base()
    if not place.is_dir():
        raise ConfigError(f"{place} is not a directory: nothing to ship")
    shipped, left = ship_all(place, server_of)
    for where, why in left.items():
        print_text(f"left in {where}: {why}", style="red")
    print_text(f"{shipped} items shipped from {place}")
    if left:
        raise typer.Exit(1)


def server_of(url: str | None) -> Server:
    """Return the PostgreSQL server of the store at ``url``. Raises ``ConfigError`` for a store that is not on
    PostgreSQL.
    """
    from rlwatch.store.url import default_store_url, open_store

    opened = open_store(url)
    server = getattr(opened, "server", None)
    if server is None:
        raise ConfigError(f"{url or default_store_url()} is not a PostgreSQL store; give --store postgresql://...")
    found: Server = server
    return found
