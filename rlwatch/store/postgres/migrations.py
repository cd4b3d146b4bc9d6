"""Create and upgrade the tables: numbered ``.sql`` files in this package, each run in one transaction with its number.

Only an explicit call (``migrate``) upgrades a database: an older trainer that still writes must not find tables it does
not know. DDL is transactional, so that a migration is done or not. A lock of the server ensures that one process at a
time does it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from psycopg import errors, sql

from rlwatch.errors import StoreError, StoreVersionError
from rlwatch.store.postgres.address import PostgresAddress
from rlwatch.store.postgres.connection import Connection
from rlwatch.store.postgres.ownership import holders_of, making

_FILE = re.compile(r"(\d{3})-[a-z-]+\.sql")
OLDEST_SERVER = 130000
"""Oldest supported server version, as libpq numbers it: PostgreSQL 13."""


def steps() -> list[str]:
    """Return the SQL of each migration, in order; the first creates the tables of format 1."""
    files = sorted((file for file in _folder().iterdir() if _FILE.fullmatch(file.name)), key=lambda file: file.name)
    return [file.read_text(encoding="utf-8") for file in files]


def script(name: str, schema: str) -> str:
    """Return an SQL script for an administrator: ``name`` is ``roles`` or ``citus``; ``schema`` is that of the
    tables.
    """
    return (_folder() / f"{name}.sql").read_text(encoding="utf-8").replace("{schema}", schema)


def version(db: Connection, address: PostgresAddress) -> int:
    """Return the number of migrations that were applied to the schema; 0 if it has no tables.

    Raises ``StoreVersionError`` if the server is older than PostgreSQL 13.
    """
    if db.info.server_version < OLDEST_SERVER:
        raise StoreVersionError(
            f"{address.where} is PostgreSQL {db.info.server_version // 10000}; 13 or newer is needed"
        )
    found = db.execute(
        "SELECT count(*) FROM pg_tables WHERE schemaname = %s AND tablename = 'schema_version'", (address.schema,)
    ).fetchone()
    if found is None or not found[0]:
        return 0
    row = db.execute(_in("SELECT coalesce(max(version), 0) FROM {}.schema_version", address)).fetchone()
    return int(row[0]) if row is not None else 0


def check(db: Connection, address: PostgresAddress) -> bool:
    """Return True if the tables exist in this program's format, False if there are none.

    Raises ``StoreVersionError`` if they have another format.
    """
    found, known = version(db, address), len(steps())
    if found > known:
        raise StoreVersionError(
            f"{address.where} has format {found}, but this rlwatch knows only up to {known}: install a newer rlwatch"
        )
    if 0 < found < known:
        raise StoreVersionError(
            f"{address.where} has format {found}, this rlwatch needs {known}: end the runs that older versions write, "
            "then `rlwatch db migrate` as the owner of the tables"
        )
    return found == known


def migrate(db: Connection, address: PostgresAddress, wanted: Sequence[str] | None = None) -> int:
    """Bring the schema to the newest format, and return the number of migrations that were missing.

    ``wanted``: SQL of the migrations; None for all of this program. Raises ``StoreError`` if the role may not create
    tables, and ``StoreVersionError`` if the schema is newer than this program.
    """
    wanted = steps() if wanted is None else wanted
    try:
        with db.transaction():
            lock = making(address)  # two who begin at once: one does it
            mine = db.execute("SELECT pg_try_advisory_xact_lock(%s)", (lock.number,)).fetchone()
            if not (mine and mine[0]) and holders_of(db, lock):
                db.execute("SELECT pg_advisory_xact_lock(%s)", (lock.number,))
            found = version(db, address)
            if found > len(wanted):
                check(db, address)
            missing = wanted[found:]
            if missing and not found:
                _begin(db, address)
            for number, step in enumerate(missing, start=found + 1):
                db.execute(step.encode())
                db.execute("INSERT INTO schema_version (version) VALUES (%s)", (number,))
    except errors.InsufficientPrivilege as error:
        raise StoreError(
            f"{address.where} has no tables of rlwatch in schema {address.schema!r} and this role may not make them; "
            "have an owner run `rlwatch db migrate` once, see docs/team-store.md"
        ) from error
    return len(missing)


def _begin(db: Connection, address: PostgresAddress) -> None:
    exists = db.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (address.schema,)).fetchone()
    if exists is None:  # IF NOT EXISTS would ask for the right to create one even where it is there
        db.execute(_in("CREATE SCHEMA {}", address))
    db.execute(
        _in(
            "CREATE TABLE {}.schema_version (version integer PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())",
            address,
        )
    )


def _in(text: str, address: PostgresAddress) -> sql.Composed:
    return sql.SQL(text).format(sql.Identifier(address.schema))


def _folder() -> resources.abc.Traversable:
    return resources.files("rlwatch.store.postgres") / "sql"
