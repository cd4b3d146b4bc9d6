"""Create and revoke logins to PostgreSQL, one for each trainer and person, so that each can be revoked separately.

A login is a role of the server in ``SCHEMA_writer``, ``_operator`` or ``_reader``, a member of its projects. The server
stores a value that can verify the token (a SCRAM verifier, made here); the token itself is stored nowhere. The server's
own grants and row-level security decide what the login may do, whatever program presents it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import errors, sql

from rlwatch.errors import ConfigError, StoreError
from rlwatch.store.postgres.connection import Connection, explained
from rlwatch.store.postgres.server import Server

_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,39}")
_MADE = "rlwatch token "
"""Prefix of the comment on a role that was created here."""


ROLES = ("writer", "operator", "reader")
"""Roles of logins: of a trainer, of a person who may act on runs, and of a person who may only read."""


@dataclass(frozen=True, slots=True)
class GivenLogin:
    """A login in its current state.

    ``role``: one of :data:`ROLES`. ``projects``: those it may access, ``*`` for all. ``by``: the user who created it.
    ``at``: when it was created, Unix seconds. ``connected``: number of open connections.
    """

    name: str
    role: str
    projects: tuple[str, ...]
    by: str
    at: float
    connected: int = 0


def create(server: Server, name: str, projects: Sequence[str], *, by: str, now: float, role: str = ROLES[0]) -> str:
    """Create a login with a role in the given projects, and return its token, which is stored nowhere.

    ``by``: the user who creates it. ``now``: Unix seconds.

    Raises
    ------
    ConfigError
        If the name is invalid, the role unknown, or there is no project.
    StoreError
        If the roles do not exist yet, a role of that name exists already, or the caller may not create roles.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a login is up to 40 small letters, digits, '_' and '-', got {name!r}")
    if role not in ROLES:
        raise ConfigError(f"a login is a {', an '.join(ROLES[:2])} or a {ROLES[2]}, got {role!r}")
    if not projects or not all(project.strip() for project in projects):
        raise ConfigError("a login needs --project; '*' is every project")
    token = secrets.token_urlsafe(32)
    group, schema = f"{server.address.schema}_{role}", server.address.schema
    login = sql.Identifier(name)
    with server.connection() as db, explained(server.address):
        if db.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (group,)).fetchone() is None:
            raise StoreError(
                f"there is no role {group}: run `rlwatch db sql roles | psql ...` first, see docs/team-store.md"
            )
        verifier = db.pgconn.encrypt_password(token.encode(), name.encode(), b"scram-sha-256").decode()
        try:
            with db.transaction():
                db.execute(
                    sql.SQL("CREATE ROLE {} LOGIN IN ROLE {} PASSWORD {}").format(
                        login, sql.Identifier(group), sql.Literal(verifier)
                    )
                )
                made = _MADE + json.dumps({"schema": schema, "by": by, "at": now, "role": role})
                db.execute(sql.SQL("COMMENT ON ROLE {} IS {}").format(login, sql.Literal(made)))
                for project in dict.fromkeys(projects):
                    db.execute("INSERT INTO member (role_name, project) VALUES (%s, %s)", (name, project))
        except errors.DuplicateObject:
            raise StoreError(f"there is a role {name!r} already: revoke it first, or choose another name") from None
    return token


def logins(server: Server) -> list[GivenLogin]:
    """Return all logins that rlwatch created for this store, sorted by name."""
    with server.connection() as db, explained(server.address):
        return _logins(db, server.address.schema)


def _logins(db: Connection, schema: str) -> list[GivenLogin]:
    rows = db.execute(
        "SELECT r.rolname, shobj_description(r.oid, 'pg_authid'), (SELECT count(*) FROM pg_stat_activity AS a "
        "WHERE a.usesysid = r.oid) FROM pg_roles AS r WHERE shobj_description(r.oid, 'pg_authid') LIKE %s ORDER BY 1",
        (f"{_MADE}%",),
    ).fetchall()
    members: dict[str, list[str]] = {}
    for role, project in db.execute("SELECT role_name, project FROM member ORDER BY 1, 2"):
        members.setdefault(role, []).append(project)
    found = []
    for name, comment, connected in rows:
        note = json.loads(str(comment).removeprefix(_MADE))
        if note.get("schema") == schema:
            projects = tuple(members.get(name, ()))
            role, by = (
                str(note.get("role", ROLES[0])),
                str(note.get("by", "")),
            )  # a writer: from before there were others
            found.append(GivenLogin(name, role, projects, by, float(note.get("at", 0)), int(connected)))
    return found


def revoke(server: Server, name: str) -> int:
    """Remove a login that rlwatch created, cut its connections, and return how many there were. Its runs stay.

    Raises ``StoreError`` if there is no such login: roles made by other means are not touched.
    """
    with server.connection() as db, explained(server.address):
        if name not in {login.name for login in _logins(db, server.address.schema)}:
            raise StoreError(
                f"there is no login {name!r} made by `rlwatch token create`; `rlwatch token list` lists them"
            )
        role = sql.Identifier(name)
        db.execute(sql.SQL("ALTER ROLE {} NOLOGIN").format(role))
        cut = db.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = %s", (name,)
        ).fetchone()
        with db.transaction():
            db.execute("DELETE FROM member WHERE role_name = %s", (name,))
            db.execute(sql.SQL("DROP ROLE {}").format(role))
    return int(cut[0]) if cut is not None else 0
