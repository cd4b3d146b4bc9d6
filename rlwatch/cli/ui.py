"""``rlwatch ui``: start the dashboard as a process whose users log in with a token."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import typer

import rlwatch
from rlwatch.alerts.config import CONFIG_VARIABLE, own_file
from rlwatch.cli import app_login
from rlwatch.cli.app_login import VARIABLES, DashboardAddress, Login
from rlwatch.cli.background import background_services, delivering, sigterm_as_ctrl_c
from rlwatch.cli.console import complain, print_text, warn
from rlwatch.cli.options import ConfigOption, StoreOption, alerting_of, examples, opened
from rlwatch.errors import ConfigError, MissingExtraError

EPILOG = examples(
    "rlwatch ui",
    "rlwatch ui --store /data/rlwatch-runs --port 8600",
    "rlwatch ui --behind-proxy 127.0.0.1 --public-url https://gpu.example.org/rlwatch",
    "rlwatch ui --check",
)
MAY = {app_login.OPERATOR: "reads and commands", app_login.VIEWER: "reads"}
PROXY = "Reverse proxy"
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: every interface.")]
PublicUrlOption = Annotated[
    list[str] | None,
    typer.Option(
        "--public-url",
        metavar="URL",
        help="Public address of the dashboard, if it differs: of a proxy, or of a tunnel (http://localhost:PORT). "
        "Repeatable.",
        rich_help_panel=PROXY,
    ),
]
ProxyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--behind-proxy",
        metavar="ADDRESS",
        help="Address or network of a trusted proxy (for X-Forwarded-For). Repeatable.",
        rich_help_panel=PROXY,
    ),
]
BasePathOption = Annotated[
    str,
    typer.Option(
        "--base-path",
        metavar="PATH",
        help="URL path prefix, e.g. /rlwatch.",
        show_default="path of --public-url",
        rich_help_panel=PROXY,
    ),
]
UserHeaderOption = Annotated[
    str,
    typer.Option(
        "--user-header",
        metavar="NAME",
        help="Header with the user name from the proxy, stored with commands.",
        rich_help_panel=PROXY,
    ),
]
OidcOption = Annotated[
    Path | None,
    typer.Option(
        "--oidc",
        metavar="FILE",
        help="Log in with an OpenID provider: its settings in Streamlit's format, and lists of addresses.",
    ),
]


def ui(
    store: StoreOption = None,
    port: PortOption = 8501,
    host: HostOption = "127.0.0.1",
    *,
    public_url: PublicUrlOption = None,
    behind_proxy: ProxyOption = None,
    base_path: BasePathOption = "",
    user_header: UserHeaderOption = "",
    oidc: OidcOption = None,
    forget_logins: Annotated[
        bool, typer.Option("--forget-logins", help="Invalidate all existing sessions first.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Start on a free port, check health, stop; exit code 0 or 1.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Open the dashboard, monitor the runs of its store, and deliver alerts of runs whose trainer is gone.

    It prints two links: the operator link can read and command, the viewer link can only read. Access needs a link.

    RLWATCH_UI_TOKEN and RLWATCH_UI_VIEWER_TOKEN, or the same names with _FILE, set your own tokens.
    """
    require_streamlit()
    where = app_login.place(
        host,
        free_port(host) if check else port,
        base_path=base_path,
        public_urls=public_url or (),
        proxies=behind_proxy or (),
        user_header=user_header,
        oidc=oidc,
    )
    if forget_logins:
        app_login.forget_sessions()
    if check:
        passing = Login(app_login.tokens(), secrets.token_urlsafe(48))
        raise typer.Exit(_check(where, passing, store, config))
    require_free_port(where.host, where.port)
    script, login = app_script(), Login.of_user()
    introduce(where, login)
    with sigterm_as_ctrl_c(), opened(store) as outbox:
        alerting = alerting_of(config, outbox)
        with delivering(outbox, alerting), background_services(outbox, alerting):
            raise typer.Exit(_serve(script, where, login, store, config))


def introduce(where: DashboardAddress, login: Login) -> None:
    """Print the login link of each role, or the place its token was set, and security warnings."""
    print_text("rlwatch dashboard  (stop with Ctrl-C)", style="bold")
    for role, token in login.tokens.items():
        link = f"{where.address}  (token: {token.source})" if token.source else where.link(token)
        print_text(f"  {role:8}  {MAY[role]:18}  {link}")
    if not login.kept:
        warn(f"warning: cannot keep a secret at {app_login.secret_path()}: everybody must log in again after a restart")
    if where.plain_beyond_loopback:
        warn(
            "warning: plain HTTP on a network: anyone on the path can read the token and take the session. "
            "Put a proxy with TLS in front (docs/dashboard.md), or keep --host 127.0.0.1 and tunnel: "
            f"ssh -L {where.port}:127.0.0.1:{where.port} <this machine>"
        )


def _serve(script: Path, where: DashboardAddress, login: Login, store: str | None, config: Path | None) -> int:
    """Run until the server ends by itself, and return its exit code, or until Ctrl-C ends both."""
    server = start_server(script, where, login, store, config=config)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop_server(server)


def _check(where: DashboardAddress, login: Login, store: str | None, config: Path | None) -> int:
    server = start_server(app_script(), where, login, store, quiet=True, config=config)
    try:
        problem = wait_healthy(server, where.local + where.base_path)
        problem = problem or refuses_strangers(where.local + where.base_path)
    finally:
        stop_server(server)
    if problem is None:
        print_text("ok: the dashboard starts, is healthy, and rejects requests without a token", style="green")
        return 0
    output, _ = server.communicate()
    complain(f"the dashboard does not start: {problem}; output: {output[-2000:]}")
    return 1


# The dashboard as a process: find its script, start it, check its health.

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 5.0
SETTINGS = "RLWATCH_UI_SETTINGS"
"""Environment variable that passes the login settings to the dashboard server; ``app/gate.py`` reads it."""


def app_script(package: Path = Path(rlwatch.__file__).parent) -> Path:
    """Return the path of the dashboard's ``main.py``: in the wheel (``rlwatch/_app``), or next to ``package`` in a
    checkout.

    Raises ``ConfigError`` if neither file exists.
    """
    places = (package / "_app" / "main.py", package.parent / "app" / "main.py")
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(f"the dashboard's files are missing: looked for {places[0]} and {places[1]}; reinstall rlwatch")


def require_streamlit() -> None:
    """Raise ``MissingExtraError`` if streamlit, or a package for the dashboard's login, is not installed."""
    for package in ("streamlit", "limits"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "app", "rlwatch ui")


def free_port(host: str) -> int:
    """Return a TCP port on ``host`` that is free now."""
    with _socket(host) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def require_free_port(host: str, port: int) -> None:
    """Raise ``ConfigError`` if a server cannot listen on ``host`` and ``port``."""
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)


def server_command(script: Path) -> list[str]:
    """Return the command line that starts the dashboard; it contains no secret, since other users can read it.

    ``-P``: Python files in the directory of the script or the working directory cannot shadow other modules.
    """
    return [sys.executable, "-P", str(script)]


def server_environment(
    place: DashboardAddress,
    login: Login,
    store_url: str | None,
    outer: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> dict[str, str]:
    """Return the environment variables of the dashboard server: store, configuration and login settings.

    Only the owner of a process can read them. ``outer`` replaces the variables of this process.
    """
    environment = dict(os.environ if outer is None else outer)
    for name in VARIABLES.values():
        environment.pop(name, None)
    from rlwatch.store.url import absolute_url

    environment["RLWATCH_STORE"] = absolute_url(store_url or environment.get("RLWATCH_STORE"))
    if environment.get("PYTHONPATH"):  # the server runs in another directory
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(part).absolute()) for part in environment["PYTHONPATH"].split(os.pathsep) if part
        )
    named = config.absolute() if config is not None else own_file()
    if named is not None:
        environment[CONFIG_VARIABLE] = str(named)
    settings = {
        "origins": place.origins,
        "wildcard": place.wildcard,
        "port": place.port,
        "base_path": place.base_path,
        "proxies": place.proxies,
        "user_header": place.user_header,
        "people": app_login.people_of(place.oidc, place) if place.oidc is not None else {},
        "tokens": {role: token.value for role, token in login.tokens.items()},
        "secret": login.signing_key(environment["RLWATCH_STORE"]),
    }
    streamlit = {
        "server.address": place.host,
        "server.port": place.port,
        "server.baseUrlPath": place.base_path.strip("/"),
        "server.headless": True,
        "server.fileWatcherType": "none",
        "server.enableCORS": True,
        "server.enableXsrfProtection": True,
        "server.enableWebsocketCompression": True,
        "server.xsrfCookieSameSite": "strict",
        "browser.gatherUsageStats": False,
        "client.showErrorDetails": "none",
        "logger.hideWelcomeMessage": True,
    }
    if place.oidc is not None:
        streamlit["secrets.files"] = [str(place.oidc)]
    environment[SETTINGS] = json.dumps(settings)
    environment[f"{SETTINGS}_STREAMLIT"] = json.dumps(streamlit)
    return environment


def start_server(
    script: Path,
    place: DashboardAddress,
    login: Login,
    store_url: str | None,
    *,
    quiet: bool = False,
    config: Path | None = None,
) -> subprocess.Popen[str]:
    """Start the dashboard server and return its process; with ``quiet`` its output can be read from ``stdout`` of that.

    The server runs in the directory of ``script``, since the current one may be a store with a ``.streamlit``
    directory.
    """
    return subprocess.Popen(
        server_command(script),
        env=server_environment(place, login, store_url, config=config),
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
    )


def wait_healthy(process: subprocess.Popen[str], url: str, deadline_s: float = START_DEADLINE_S) -> str | None:
    """Wait until the server at ``url`` is healthy and return None, or return the reason that it is not.

    It gives up when ``process`` ends or after ``deadline_s`` seconds.
    """
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if process.poll() is not None:
            return f"the server ended with code {process.returncode}"
        if healthy(url):
            return None
        time.sleep(0.1)
    return f"no healthy answer from {url} within {deadline_s:g} s"


def refuses_strangers(url: str) -> str | None:
    """Return None if the dashboard at ``url`` refuses a request without a token, else a description of its response."""
    try:
        with urlopen(f"{url}/", timeout=10.0) as answer:  # noqa: S310  (http, this machine)
            return f"a request without a token got {answer.status}"
    except HTTPError as refusal:
        return None if refusal.code == 401 else f"a request without a token got {refusal.code}"
    except OSError as error:
        return f"no answer: {error}"


def healthy(url: str) -> bool:
    """Return whether the dashboard at ``url`` answers its health check."""
    try:
        with urlopen(f"{url}/_stcore/health", timeout=2.0) as answer:  # noqa: S310  (http, loopback)
            return bool(answer.status == 200 and answer.read().strip() == b"ok")
    except (URLError, OSError):
        return False


def stop_server(process: subprocess.Popen[str], deadline_s: float = STOP_DEADLINE_S) -> None:
    """Terminate the server ``process``, and kill it if it has not ended after ``deadline_s`` seconds."""
    process.terminate()
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
