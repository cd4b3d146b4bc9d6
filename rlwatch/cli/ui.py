"""``rlwatch ui``: the dashboard, on this machine only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlwatch.cli import app_server
from rlwatch.cli.config_file import alerting_of
from rlwatch.cli.console import say
from rlwatch.cli.delivery import delivering
from rlwatch.cli.ending import sigterm_as_ctrl_c
from rlwatch.cli.failures import complain
from rlwatch.cli.looking_after import looking_after
from rlwatch.cli.options import ConfigOption, StoreOption, examples
from rlwatch.cli.stores import opened

EPILOG = examples(
    "rlwatch ui",
    "rlwatch ui --store /data/rlwatch-runs --port 8600",
    "rlwatch ui --check",
)


def ui(
    store: StoreOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8501,
    host: Annotated[str, typer.Option("--host", help="Loopback address to listen on; others are refused.")] = (
        "127.0.0.1"
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Start on a free port, wait until healthy, stop; exit code 0 or 1.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Open the dashboard, look after the runs of its store, and deliver alerts of those whose trainer is gone."""
    app_server.require_loopback(host)
    app_server.require_streamlit()
    if check:
        raise typer.Exit(_check(host, store, config))
    app_server.require_free_port(host, port)
    script = app_server.app_script()
    say(f"rlwatch dashboard: {app_server.address(host, port)}  (Ctrl-C stops it)", style="bold")
    with sigterm_as_ctrl_c(), opened(store) as outbox:
        alerting = alerting_of(config, outbox)
        with delivering(outbox, alerting), looking_after(outbox, alerting):
            raise typer.Exit(_serve(script, host, port, store, config))


def _serve(script: Path, host: str, port: int, store: str | None, config: Path | None) -> int:
    """Until the server ends by itself (then its exit code) or Ctrl-C ends both."""
    server = app_server.start(script, host, port, store, config=config)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        app_server.stop(server)


def _check(host: str, store: str | None, config: Path | None) -> int:
    port = app_server.free_port(host)
    server = app_server.start(app_server.app_script(), host, port, store, quiet=True, config=config)
    try:
        problem = app_server.wait_healthy(server, app_server.address(host, port))
    finally:
        app_server.stop(server)
    if problem is None:
        say("ok: the dashboard starts and is healthy", style="green")
        return 0
    said, _ = server.communicate()
    complain(f"the dashboard does not start: {problem}; it said: {said[-2000:]}")
    return 1
