"""Parse the URL of a ClickHouse server's HTTP interface: the part that may be displayed, and how long data are kept."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from rlwatch.errors import MissingExtraError, StoreURLError

LOOKS = "clickhouse://user@host:8123/database?secure=true&keep_tokens=90d"
KEPT = {"keep_rows": ("record", "point", "latest"), "keep_tokens": ("spike",), "keep_completions": ("completion",)}
"""Option -> tables whose rows are removed after so many days; without the option they stay."""
_OWN = ("secure", "verify", "ca_cert", "client_cert", "client_cert_key")
_DAYS = re.compile(r"([1-9][0-9]{0,4})d")
_YES = {"true": True, "1": True, "false": False, "0": False}
_DEFAULTS = {"async_insert": "1", "wait_for_async_insert": "1"}
"""The server gathers the inserts of many writers before it answers them: one part for all, and none is lost."""


@dataclass(frozen=True, slots=True)
class ClickHouseAddress:
    """One database of one ClickHouse server.

    ``url``: without a password. ``where``: description for error messages. ``client``: arguments of the client, with
    the password. ``settings``: of the server, sent with every request. ``keep_days``: table -> days until its rows are
    removed.
    """

    url: str
    where: str
    client: dict[str, str | int | bool] = field(repr=False)
    settings: dict[str, str]
    keep_days: dict[str, int]


def read_place(url: str) -> ClickHouseAddress:
    """Return the parsed ``url``. Raises ``StoreURLError``, which never repeats the URL: it may hold a password.

    User and password default to ``CLICKHOUSE_USER`` and ``CLICKHOUSE_PASSWORD``.
    """
    try:
        parts = urlsplit(url)
        port, options = parts.port, dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _unreadable() from None
    if parts.scheme != "clickhouse" or not parts.hostname:
        raise _unreadable()
    secure = _yes(options, "secure", default=False)
    port = port or (8443 if secure else 8123)
    database = unquote(parts.path.strip("/")) or "default"
    user = unquote(parts.username or "")
    client: dict[str, str | int | bool] = {
        "host": parts.hostname,
        "port": port,
        "interface": "https" if secure else "http",
        "username": user or os.environ.get("CLICKHOUSE_USER", "default"),
        "password": unquote(parts.password or "") or os.environ.get("CLICKHOUSE_PASSWORD", ""),
        "database": database,
        "verify": _yes(options, "verify", default=True),
    }
    client |= {name: options[name] for name in ("ca_cert", "client_cert", "client_cert_key") if name in options}
    settings = {name: value for name, value in options.items() if name not in (*_OWN, *KEPT)}
    shown = f"clickhouse://{user + '@' if user else ''}{parts.hostname}:{port}/{database}"
    kept = urlencode({name: value for name, value in options.items() if "password" not in name}, safe="/")
    return ClickHouseAddress(
        f"{shown}?{kept}" if kept else shown,
        f"ClickHouse database {database!r} on {parts.hostname}:{port}",
        client,
        _DEFAULTS | settings,
        {table: _days(options[name], name) for name in KEPT if name in options for table in KEPT[name]},
    )


def known_client() -> None:
    """Raise ``MissingExtraError`` if clickhouse-connect is not installed."""
    try:
        import clickhouse_connect  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("clickhouse_connect", "clickhouse", "series in ClickHouse") from error


def _unreadable() -> StoreURLError:
    return StoreURLError(
        f"series= of a postgresql: store cannot be read; it looks like {LOOKS}, with %26 for & and %40 and the like "
        "for other characters"
    )


def _yes(options: dict[str, str], name: str, *, default: bool) -> bool:
    value = options.get(name, "").lower()
    if value and value not in _YES:
        raise StoreURLError(f"{name}= of a clickhouse: address is true or false; got {value!r}")
    return _YES.get(value, default)


def _days(value: str, name: str) -> int:
    match = _DAYS.fullmatch(value)
    if match is None:
        raise StoreURLError(f"{name}= of a clickhouse: address is a number of days such as 90d; got {value!r}")
    return int(match.group(1))
