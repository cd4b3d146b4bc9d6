"""``rlwatch ui``: the dashboard, for whoever has its token."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from rlwatch.cli import app_login, app_server
from rlwatch.cli.app_login import Login, Place
from rlwatch.cli.config_file import alerting_of
from rlwatch.cli.console import errors, say
from rlwatch.cli.delivery import delivering
from rlwatch.cli.ending import sigterm_as_ctrl_c
from rlwatch.cli.failures import complain
from rlwatch.cli.looking_after import looking_after
from rlwatch.cli.options import ConfigOption, StoreOption, examples
from rlwatch.cli.stores import opened

EPILOG = examples(
    "rlwatch ui",
    "rlwatch ui --store /data/rlwatch-runs --port 8600",
    "rlwatch ui --behind-proxy 127.0.0.1 --public-url https://gpu.example.org/rlwatch",
    "rlwatch ui --check",
)
MAY = {app_login.OPERATOR: "reads and commands", app_login.VIEWER: "reads"}
PROXY = "Reverse proxy"


def ui(
    store: StoreOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8501,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0: every interface of this machine.")
    ] = "127.0.0.1",
    *,
    public_url: Annotated[
        list[str] | None,
        typer.Option(
            "--public-url",
            metavar="URL",
            help="The address people open, where it is another: a proxy's, or a tunnel's http://localhost:PORT. May be "
            "repeated.",
            rich_help_panel=PROXY,
        ),
    ] = None,
    behind_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--behind-proxy",
            metavar="ADDRESS",
            help="Address or network of a proxy, whose X-Forwarded-For is believed. May be repeated.",
            rich_help_panel=PROXY,
        ),
    ] = None,
    base_path: Annotated[
        str,
        typer.Option(
            "--base-path",
            metavar="PATH",
            help="Serve below this path, as /rlwatch.",
            show_default="that of --public-url",
            rich_help_panel=PROXY,
        ),
    ] = "",
    user_header: Annotated[
        str,
        typer.Option(
            "--user-header",
            metavar="NAME",
            help="The header in which the proxy names the person; kept with their commands.",
            rich_help_panel=PROXY,
        ),
    ] = "",
    forget_logins: Annotated[
        bool, typer.Option("--forget-logins", help="First end every session of your dashboards that are started anew.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Start on a free port, wait until healthy, stop; exit code 0 or 1.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Open the dashboard, look after the runs of its store, and deliver alerts of those whose trainer is gone.

    It prints two links: the operator's lets people read and command, the viewer's lets them read. Nobody else gets in.

    RLWATCH_UI_TOKEN and RLWATCH_UI_VIEWER_TOKEN, or the same with _FILE, set tokens of your own.
    """
    app_server.require_streamlit()
    where = app_login.place(
        host,
        app_server.free_port(host) if check else port,
        base_path=base_path,
        public_urls=public_url or (),
        proxies=behind_proxy or (),
        user_header=user_header,
    )
    if forget_logins:
        app_login.forget_sessions()
    if check:
        passing = Login(app_login.tokens(), secrets.token_urlsafe(48))
        raise typer.Exit(_check(where, passing, store, config))
    app_server.require_free_port(where.host, where.port)
    script, login = app_server.app_script(), Login.of_user()
    _introduce(where, login)
    with sigterm_as_ctrl_c(), opened(store) as outbox:
        alerting = alerting_of(config, outbox)
        with delivering(outbox, alerting), looking_after(outbox, alerting):
            raise typer.Exit(_serve(script, where, login, store, config))


def _introduce(where: Place, login: Login) -> None:
    """The links, by role; of a token that was set, where it was. And what is not as safe as it could be."""
    say("rlwatch dashboard  (Ctrl-C stops it)", style="bold")
    for role, token in login.tokens.items():
        link = f"{where.address}  (token: {token.source})" if token.source else where.link(token)
        say(f"  {role:8}  {MAY[role]:18}  {link}")
    if not login.kept:
        warn(f"cannot keep a secret at {app_login.secret_path()}: everybody must log in again after a restart")
    if where.plain_beyond_loopback:
        warn(
            "plain HTTP beyond this machine: whoever is on the way can read the token and take the session. Put a "
            "proxy with TLS in front (docs/dashboard.md), or keep --host 127.0.0.1 and tunnel: "
            f"ssh -L {where.port}:127.0.0.1:{where.port} <this machine>"
        )


def warn(text: str) -> None:
    """One line, on stderr."""
    errors().print(f"warning: {text}", style="yellow", soft_wrap=True)


def _serve(script: Path, where: Place, login: Login, store: str | None, config: Path | None) -> int:
    """Until the server ends by itself (then its exit code) or Ctrl-C ends both."""
    server = app_server.start(script, where, login, store, config=config)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        app_server.stop(server)


def _check(where: Place, login: Login, store: str | None, config: Path | None) -> int:
    server = app_server.start(app_server.app_script(), where, login, store, quiet=True, config=config)
    try:
        problem = app_server.wait_healthy(server, where.local + where.base_path)
        problem = problem or app_server.refuses_strangers(where.local + where.base_path)
    finally:
        app_server.stop(server)
    if problem is None:
        say("ok: the dashboard starts, is healthy, and lets nobody in without a token", style="green")
        return 0
    said, _ = server.communicate()
    complain(f"the dashboard does not start: {problem}; it said: {said[-2000:]}")
    return 1
