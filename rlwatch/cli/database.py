"""``rlwatch db`` and ``rlwatch sync``: a team's store on PostgreSQL, seen by who looks after it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.cli.console import say
from rlwatch.cli.options import StoreOption, examples
from rlwatch.errors import ConfigError

if TYPE_CHECKING:
    from rlwatch.store.postgres.server import Server

URL = "postgresql://owner@db.example.com/rlwatch"
group = typer.Typer(
    help="A team's store on PostgreSQL: make and upgrade its tables, its roles.",
    no_args_is_help=True,
    epilog=examples(f"rlwatch db migrate --store {URL}", f"rlwatch db sql roles --store {URL} | psql {URL}"),
)
MIGRATE_EPILOG = examples(f"rlwatch db migrate --store {URL}")
SQL_EPILOG = examples(f"rlwatch db sql roles --store {URL} | psql {URL}", "rlwatch db sql citus")
SYNC_EPILOG = examples("rlwatch sync", "rlwatch sync /scratch/rlwatch")


class Script(StrEnum):
    """Scripts for an administrator."""

    ROLES = "roles"
    CITUS = "citus"


@group.command("migrate", epilog=MIGRATE_EPILOG)
def migrate(store: StoreOption = None) -> None:
    """Make the tables of a store on PostgreSQL, or bring them up to date. Run it as their owner."""
    from rlwatch.store.postgres import migrations

    server = _server(store)
    done, newest = server.migrate(), len(migrations.steps())
    say(f"{server.address.url}: format {newest}, " + ("made" if done else "nothing to do"))


@group.command("sql", epilog=SQL_EPILOG)
def sql(
    script: Annotated[Script, typer.Argument(help="For roles and row-level security, or for Citus.")],
    store: StoreOption = None,
) -> None:
    """Print SQL for psql: reader, writer and operator roles with row-level security, or distribution by Citus."""
    from rlwatch.store.postgres import migrations

    print(migrations.script(script.value, _server(store).address.schema))


def sync(
    directory: Annotated[
        Path | None,
        typer.Argument(help="A trainer's local directory, or one above.", show_default="RLWATCH_LOCAL_DIR, else /tmp"),
    ] = None,
) -> None:
    """Ship what killed trainers left on this machine's disk to the store on PostgreSQL that they wrote to."""
    from rlwatch.store.postgres.shipping import sync as ship_all
    from rlwatch.store.sqlite.shared import local_base

    place = directory or local_base()
    if not place.is_dir():
        raise ConfigError(f"{place} is no directory: nothing was left there")
    shipped, left = ship_all(place, _server)
    for where, why in left.items():
        say(f"left in {where}: {why}", style="red")
    say(f"{shipped} items shipped from {place}")
    if left:
        raise typer.Exit(1)


def _server(url: str | None) -> Server:
    from rlwatch.store.url import default_store_url, open_store

    opened = open_store(url)
    server = getattr(opened, "server", None)
    if server is None:
        raise ConfigError(f"{url or default_store_url()} is no store on PostgreSQL; give --store postgresql://...")
    found: Server = server
    return found
