"""Parse the URL of a store on PostgreSQL: libpq's settings, rlwatch's options, and the part that may be displayed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import quote, unquote

from rlwatch.errors import MissingExtraError, StoreURLError
from rlwatch.store.clickhouse.address import ClickHouseAddress, known_client, read_place

SCHEMA = "rlwatch"
"""Schema of the tables in the database, unless the URL has ``schema=``."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_OURS = ("schema", "series")
_SECRET = ("password", "sslpassword")
_DEFAULTS = {
    "connect_timeout": "5",
    "application_name": "rlwatch",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """One schema of one database on one server.

    ``url``: the store's URL without a password. ``settings``: connection settings of libpq by name, with a password if
    the URL has one; libpq takes missing ones from its own environment variables and files. ``series``: the ClickHouse
    server that has rows, localised tokens and completions; None if PostgreSQL has them.
    """

    url: str
    schema: str
    settings: dict[str, str] = field(repr=False)
    series: ClickHouseAddress | None = None

    @property
    def where(self) -> str:
        """Description of the database for error messages, without a password."""
        settings = self.settings
        host, port = settings.get("host") or settings.get("hostaddr") or "", settings.get("port")
        service = f"service {settings['service']}" if "service" in settings else ""
        place = f"{host}:{port}" if port else host
        return f"database {settings.get('dbname', '')!r} on {place or service or 'the default host'}"

    def key(self, *names: str) -> int:
        """Return a 64-bit number for the lock ``names`` of this schema, the same in every process."""
        digest = sha256("/".join((self.schema, *names)).encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


def read_address(url: str) -> PostgresAddress:
    """Return the parsed store ``url``. Raises ``StoreURLError`` for an invalid one.

    The message never repeats the URL, which may hold a password.
    """
    own, rest = _own(url)
    schema = own.get("schema", SCHEMA)
    if not _NAME.fullmatch(schema):
        raise StoreURLError(
            "schema= of a postgresql: store is up to 40 small letters, digits and '_', not starting with a digit"
        )
    settings = _settings(rest)
    series = read_place(own["series"]) if own.get("series") else None
    shown = [_without_secrets(rest)]
    if schema != SCHEMA:
        shown.append(f"schema={schema}")
    if series is not None:
        known_client()
        shown.append(f"series={quote(series.url, safe='/:@?=,')}")
    url = shown[0] + ("&" if "?" in shown[0] else "?") * (len(shown) > 1) + "&".join(shown[1:])
    return PostgresAddress(url, schema, _DEFAULTS | settings, series)


def _own(url: str) -> tuple[dict[str, str], str]:
    """Split our options from the URL; return both."""
    head, _, query = url.partition("?")
    parts = [part.partition("=") for part in query.split("&") if part]
    ours = {name: unquote(value) for name, _, value in parts if name in _OURS}
    rest = "&".join("".join(part) for part in parts if part[0] not in _OURS)
    return ours, f"{head}?{rest}" if rest else head


def known_driver() -> None:
    """Raise ``MissingExtraError`` if psycopg, or its libpq, is not installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("psycopg", "postgres", "a store on PostgreSQL") from error


def _settings(url: str) -> dict[str, str]:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        return {name: str(value) for name, value in conninfo_to_dict(url).items()}
    except ProgrammingError:
        raise StoreURLError(
            "the postgresql: URL cannot be read; it looks like postgresql://user@host:5432/database?sslmode=verify-full"
            ", with options of libpq only, and %40 and the like for other characters"
        ) from None


def _without_secrets(url: str) -> str:
    head, _, query = url.partition("?")
    scheme, _, rest = head.partition("://")
    place, slash, database = rest.partition("/")
    user, at, host = place.rpartition("@")
    kept = "&".join(part for part in query.split("&") if part and part.partition("=")[0] not in _SECRET)
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{database}{'?' if kept else ''}{kept}"
