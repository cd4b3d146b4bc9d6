"""Logins: tokens, session secret and origins of the dashboard; ``rlwatch token`` for PostgreSQL."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import secrets
import socket
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlencode, urlsplit

import typer

from rlwatch.cli.console import print_json, print_table, print_text
from rlwatch.cli.database import server_of
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me
from rlwatch.clock import SystemClock
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.wording import local_moment, plural

OPERATOR, VIEWER = "operator", "viewer"
VARIABLES = {OPERATOR: "RLWATCH_UI_TOKEN", VIEWER: "RLWATCH_UI_VIEWER_TOKEN"}
"""Environment variable of each role's login token; the variable with ``_FILE`` appended names a file with the token."""

SHORTEST_TOKEN = 16
"""Fewest characters that a login token chosen by a user, or the session secret, may have."""

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORTS = {"http": 80, "https": 443}
SECRET_FILE = "ui-secret"  # noqa: S105  (a file's name)


@dataclass(frozen=True, slots=True)
class LoginToken:
    """A login token of the dashboard for one role. ``source`` is the variable or file that set it, empty if it was
    generated when the dashboard started.
    """

    value: str = field(repr=False)
    source: str = ""


def tokens(env: Mapping[str, str] | None = None) -> dict[str, LoginToken]:
    """Return the login token of each dashboard role: the one set in the environment, otherwise a newly generated one.

    ``env`` replaces the environment variables of this process. Raises ``ConfigError`` for a token that is too short,
    readable by other users, or the same for both roles.
    """
    env = os.environ if env is None else env
    found = {role: _configured(name, env) or LoginToken(secrets.token_urlsafe(32)) for role, name in VARIABLES.items()}
    if found[OPERATOR].value == found[VIEWER].value:
        raise ConfigError(f"{' and '.join(VARIABLES.values())} are the same: a viewer would be an operator")
    return found


def _configured(name: str, env: Mapping[str, str]) -> LoginToken | None:
    file = env.get(f"{name}_FILE")
    if file:
        value, source = _private_text(Path(file).expanduser()).strip(), f"{file} ({name}_FILE)"
    else:
        value, source = env.get(name, "").strip(), name
    if not value and not file:
        return None
    if len(value) < SHORTEST_TOKEN or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"the token in {source} has {len(value)} characters: it takes at least {SHORTEST_TOKEN}, all of them "
            "ASCII; make one with: openssl rand -base64 32"
        )
    return LoginToken(value, source)


def _private_text(path: Path) -> str:
    """Read ``path``. Raises ``ConfigError`` if it cannot be read, or other users can read it."""
    try:
        with path.open(encoding="utf-8") as file:
            state = os.fstat(file.fileno())
            text = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_IMODE(state.st_mode) & 0o077 or state.st_uid not in {os.getuid(), 0}:
        mode, owner = stat.S_IMODE(state.st_mode), state.st_uid
        raise ConfigError(
            f"{path} is no secret: mode {mode:o}, owned by user {owner}; it must be yours alone: "
            f"chown {os.getuid()} {path}; chmod 600 {path}"
        )
    return text


@dataclass(frozen=True, slots=True)
class Login:
    """Login tokens of the dashboard by role, and the secret that signs session cookies.

    ``kept`` is False if the secret could not be stored, so that sessions end when the server stops.
    """

    tokens: Mapping[str, LoginToken]
    secret: str = field(repr=False)
    kept: bool = True

    @classmethod
    def of_user(cls, env: Mapping[str, str] | None = None) -> Login:
        """Return the tokens and the session secret of the user who runs this process.

        ``env`` replaces the environment variables. Raises ``ConfigError`` for an unsafe token or secret.
        """
        chosen = tokens(env)
        try:
            return cls(chosen, session_secret(secret_path(env)))
        except OSError:  # no writable home directory: sessions end with the server
            return cls(chosen, secrets.token_urlsafe(48), kept=False)

    def signing_key(self, store_url: str) -> str:
        """Return the key that signs dashboard sessions for the store at ``store_url``.

        The key depends on the store and on the tokens that were set, so sessions of another store, or from before a
        change of token, are invalid.
        """
        set_ones = [f"{role} {token.value}" for role, token in sorted(self.tokens.items()) if token.source]
        text = json.dumps(
            [self.secret, store_url if "://" in store_url else os.path.realpath(store_url or "rlwatch-runs"), *set_ones]
        )
        return hashlib.sha256(text.encode()).hexdigest()


def secret_path(env: Mapping[str, str] | None = None) -> Path:
    """Return the path of the user's file with the secret that signs dashboard sessions."""
    from rlwatch.integrations.verl.heartbeat import state_home

    return state_home(env) / SECRET_FILE


def session_secret(path: Path | None = None) -> str:
    """Return the user's secret that signs dashboard sessions; it is created on first use and kept across restarts.

    ``path`` is the file, by default :func:`secret_path`. Raises ``ConfigError`` if other users can read the file or it
    is damaged, ``OSError`` if no file can be written.
    """
    path = path or secret_path()
    if not path.exists():
        _make_secret(path)
    secret = _private_text(path).strip()
    if len(secret) < SHORTEST_TOKEN:
        raise ConfigError(f"{path} is damaged: remove it, and everybody logs in again")
    return secret


def _make_secret(path: Path) -> None:
    """Create the secret file atomically; of two processes that create it at once, the first wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(48) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def forget_sessions(path: Path | None = None) -> None:
    """Delete the secret that signs dashboard sessions, so that every user must log in again after the next start."""
    (path or secret_path()).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class DashboardAddress:
    """Address that the dashboard listens on, and the public addresses under which browsers reach it.

    Parameters
    ----------
    host, port
        Address and port to listen on.
    base_path
        URL path of the dashboard: ``""`` or ``/name``.
    public
        Origins (``https://gpu.example.org``) under which a proxy or a tunnel serves it.
    proxies
        Addresses and networks of trusted proxies, whose forwarded headers are used.
    user_header
        The header in which the proxy sends the user name.
    oidc
        Configuration file of the OIDC provider and of the users who may log in.
    """

    host: str
    port: int
    base_path: str = ""
    public: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    user_header: str = ""
    oidc: Path | None = None

    @property
    def wildcard(self) -> bool:
        """True if the dashboard listens on every network interface."""
        return self.host in {"0.0.0.0", "::"}  # noqa: S104

    @property
    def local(self) -> str:
        """URL of the dashboard for processes on the same machine."""
        return origin("http", {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)  # noqa: S104

    @property
    def origins(self) -> tuple[str, ...]:
        """Every origin (scheme, host and port) from which the dashboard accepts requests.

        On a wildcard address the server also accepts the address that the client used.
        """
        names = [*LOCAL_NAMES] if self.wildcard or is_loopback(self.host) else []
        names += [] if self.wildcard else [self.host]
        if not self.public and not is_loopback(self.host):
            names += [socket.gethostname(), socket.getfqdn()]
        return tuple(dict.fromkeys((*(origin("http", name, self.port) for name in names), *self.public)))

    @property
    def address(self) -> str:
        """URL of the dashboard to open in a browser."""
        host = socket.gethostname() if self.wildcard else self.host
        return f"{self.public[0] if self.public else origin('http', host, self.port)}{self.base_path}/"

    def link(self, token: LoginToken) -> str:
        """Return the URL that logs a user in to the dashboard with ``token``."""
        return f"{self.address}login?{urlencode({'token': token.value})}"

    @property
    def plain_beyond_loopback(self) -> bool:
        """True if login tokens would cross a network unencrypted."""
        if self.public:
            return any(not url.startswith("https:") and not _loopback_origin(url) for url in self.public)
        return not is_loopback(self.host)


def place(
    host: str,
    port: int,
    *,
    base_path: str = "",
    public_urls: Sequence[str] = (),
    proxies: Sequence[str] = (),
    user_header: str = "",
    oidc: Path | None = None,
) -> DashboardAddress:
    """Return the dashboard's address from the values of the command-line options.

    Raises ``ConfigError`` for invalid or contradictory values.
    """
    urls = [_public(url) for url in public_urls]
    paths = {path for _, path in urls} | ({_path(base_path)} if base_path else set())
    if len(paths) > 1:
        raise ConfigError(
            "--base-path and every --public-url must name the same path, for the proxy passes it on as it is; got "
            + ", ".join(sorted(path or "/" for path in paths))
        )
    if proxies and not urls:
        raise ConfigError(
            "--behind-proxy needs --public-url: the address that people open, as https://gpu.example.org/"
        )
    if user_header and not proxies:
        raise ConfigError("--user-header needs --behind-proxy: from anybody else the header would be a claim")
    if user_header and not re.fullmatch(r"[A-Za-z0-9-]+", user_header):
        raise ConfigError(f"--user-header is no header's name: {user_header!r}")
    found = DashboardAddress(
        host.strip("[]").lower(),
        port,
        paths.pop() if paths else "",
        tuple(dict.fromkeys(found for found, _ in urls)),
        tuple(map(_network, proxies)),
        user_header.lower(),
        oidc.absolute() if oidc is not None else None,
    )
    if oidc is not None:
        people_of(oidc, found)
    return found


_PROVIDER = ("redirect_uri", "cookie_secret", "client_id", "client_secret", "server_metadata_url")
_SHORTEST_SECRET = 32


def people_of(file: Path, at: DashboardAddress) -> dict[str, list[str]]:
    """Return, for each dashboard role, the e-mail addresses that may log in through the OIDC provider of ``file``.

    ``file`` is in Streamlit's format (``[auth]``) with a table ``[rlwatch]`` of ``operators`` and ``viewers``. Raises
    ``ConfigError`` for a file that would admit no user, or all, and ``MissingExtraError`` without authlib.
    """
    if find_spec("authlib") is None:
        raise MissingExtraError("authlib", "oidc", "--oidc")
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--oidc {file}: {error}") from None
    auth, lists = document.get("auth", {}), document.get("rlwatch", {})
    if missing := [name for name in _PROVIDER if not (isinstance(auth.get(name), str) and auth[name])]:
        raise ConfigError(f"--oidc {file}: [auth] lacks {', '.join(missing)} (docs/dashboard.md has an example)")
    if len(auth["cookie_secret"]) < _SHORTEST_SECRET:
        raise ConfigError(
            f"--oidc {file}: cookie_secret has fewer than {_SHORTEST_SECRET} characters, so can be guessed"
        )
    callbacks = [f"{each}{at.base_path}/oauth2callback" for each in at.origins]
    if auth["redirect_uri"] not in callbacks:
        raise ConfigError(
            f"--oidc {file}: redirect_uri {auth['redirect_uri']!r} is not of this dashboard; it answers to "
            + ", ".join(callbacks)
        )
    people = {role: lists.get(f"{role}s", []) for role in (OPERATOR, VIEWER)}
    wrong = [one for listed in people.values() for one in (listed if isinstance(listed, list) else [listed])]
    if not wrong or any(not isinstance(one, str) or "@" not in one for one in wrong):
        raise ConfigError(
            f"--oidc {file}: [rlwatch] wants operators and viewers, lists of addresses such as ann@example.org or "
            f"*@example.org; got {lists!r}"
        )
    return people


def _public(url: str) -> tuple[str, str]:
    """Return origin and path of a public address."""
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--public-url {url!r}: {error}") from None
    extra = parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or extra:
        raise ConfigError(f"--public-url wants an address like https://gpu.example.org/rlwatch, got {url!r}")
    return origin(parts.scheme, parts.hostname, port or DEFAULT_PORTS[parts.scheme]), _path(parts.path)


def _path(path: str) -> str:
    bare = path.strip("/")
    if bare and not re.fullmatch(r"[\w~-][\w.~-]*(/[\w~-][\w.~-]*)*", bare, re.ASCII):
        raise ConfigError(f"--base-path wants a path like /rlwatch, got {path!r}")
    return f"/{bare}" if bare else ""


def _network(address: str) -> str:
    try:
        return str(ipaddress.ip_network(address.strip(), strict=False))
    except ValueError:
        raise ConfigError(
            f"--behind-proxy wants the proxy's address or network, as 127.0.0.1 or 10.0.0.0/24; got {address!r}"
        ) from None


def origin(scheme: str, host: str, port: int) -> str:
    """Return the origin of ``scheme``, ``host`` and ``port`` as browsers write it: IPv6 in brackets, without the
    default port.
    """
    bare = host.strip("[]").lower()
    shown = f"[{bare}]" if ":" in bare else bare
    return f"{scheme}://{shown}" + ("" if port == DEFAULT_PORTS[scheme] else f":{port}")


def _loopback_origin(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost``, ``127.x.y.z`` or ``::1``; other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ``rlwatch token create | list | revoke``: a login of its own for each trainer and person on PostgreSQL.


URL = "postgresql://owner@db.example.com/rlwatch"
group = typer.Typer(
    help="Create, list and revoke logins of trainers and people to a PostgreSQL store.",
    no_args_is_help=True,
    epilog=examples(f"rlwatch token create node7 --project math --store {URL}", f"rlwatch token list --store {URL}"),
)
CREATE_EPILOG = examples(
    f"rlwatch token create node7 --project math --store {URL}",
    f"rlwatch token create nightly --project math --project code --store {URL}",
    f"rlwatch token create ann --role operator --project '*' --store {URL}",
)
LIST_EPILOG = examples(f"rlwatch token list --store {URL}")
REVOKE_EPILOG = examples(f"rlwatch token revoke node7 --store {URL}")


@group.command("create", epilog=CREATE_EPILOG)
def create(
    name: Annotated[str, typer.Argument(help="Name of the login: small letters, digits, '_' and '-'.")],
    *,
    project: Annotated[list[str], typer.Option("--project", help="Project of the login; '*': all. Repeatable.")],
    role: Annotated[
        str, typer.Option("--role", help="writer: record runs; operator: command and acknowledge; reader: read only.")
    ] = "writer",
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Create a login and print its token once; the server stores only a verifier."""
    from rlwatch.store.postgres import logins

    token = logins.create(server_of(store), name, project, by=by or me(), now=SystemClock().now(), role=role)
    may = {"writer": "record runs of", "operator": "see and command runs of", "reader": "see runs of"}[role]
    print_text(f"{name} may {may} {', '.join(project)}. With {name}@ in the store's URL:")
    print(f"PGPASSWORD={token}")


@group.command("list", epilog=LIST_EPILOG)
def list_logins(store: StoreOption = None, output: FormatOption = OutputFormat.TEXT) -> None:
    """List logins with creator and open connections."""
    from rlwatch.store.postgres import logins

    found = logins.logins(server_of(store))
    if output is OutputFormat.JSON:
        print_json(found)
    elif found:
        rows = [(t.name, t.role, ", ".join(t.projects), t.by, local_moment(t.at), str(t.connected)) for t in found]
        print_table(("login", "role", "projects", "created by", "when", ">connections"), rows)
    else:
        print_text("no logins")


@group.command("revoke", epilog=REVOKE_EPILOG)
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the login.")],
    *,
    store: StoreOption = None,
) -> None:
    """Revoke a login and close its connections. Its records stay."""
    from rlwatch.store.postgres import logins

    cut = logins.revoke(server_of(store), name)
    print_text(f"{name} is revoked; {plural(cut, 'connection')} cut")
