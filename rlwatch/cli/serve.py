"""``rlwatch serve``: all services for a team's store in one process: liveness checks, alerts, dashboard, health,
metrics.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.analysis.gauges import TYPE, Gauge, exposition, gauges
from rlwatch.cli import app_login, ui
from rlwatch.cli.app_login import DashboardAddress, Login
from rlwatch.cli.background import LAST_ROUND_S, sigterm_as_ctrl_c, watchman
from rlwatch.cli.console import print_text
from rlwatch.cli.options import ConfigOption, StoreOption, alerting_of, examples, opened
from rlwatch.cli.serving_metrics import HOUR_S, GaugeCache
from rlwatch.error_boundary import described, run_forever, sheltered
from rlwatch.error_boundary import log_message as log
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.metrics import meaning_of
from rlwatch.records import OutboxStatus
from rlwatch.redaction import redacted

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

    from rlwatch.alerts.outbox import DeliveryThread
    from rlwatch.monitor.watchman import WatchmanThread
    from rlwatch.ports import Store
    from rlwatch.run.machine import MachineThread

EPILOG = examples(
    "rlwatch serve --store postgresql://operator@db/rlwatch",
    "rlwatch serve --store /data/rlwatch-runs --host 0.0.0.0 --public-url https://gpu.example.org/rlwatch",
    "rlwatch serve --no-ui --listen 0.0.0.0:9464 --engine http://gpu-2:8000/metrics",
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest pause before a dashboard that ended is restarted, in seconds; the pause doubles each time."""
CHECK_S = 0.5
"""Seconds between two checks of the dashboard process."""
FRESH_S = 2.0
"""Seconds for which the result of a readiness check is cached."""


def serve(
    store: StoreOption = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Listen address of /healthz, /readyz and /metrics.")
    ] = "127.0.0.1:9464",
    hours: Annotated[
        float, typer.Option("--hours", min=0.0, help="Hours of inactivity after which a run leaves /metrics; 0: never.")
    ] = 24.0,
    *,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not start the dashboard.")] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", metavar="URL", help="Metrics URL of a rollout engine to re-export in /metrics. Repeatable."
        ),
    ] = None,
    host: ui.HostOption = "127.0.0.1",
    port: ui.PortOption = 8501,
    public_url: ui.PublicUrlOption = None,
    behind_proxy: ui.ProxyOption = None,
    base_path: ui.BasePathOption = "",
    user_header: ui.UserHeaderOption = "",
    oidc: ui.OidcOption = None,
    config: ConfigOption = None,
) -> None:
    """Run all services of a team's store: monitoring, alert delivery, dashboard and metrics. SIGTERM stops it
    cleanly.

    /healthz reports liveness (restart the process if it fails), /readyz readiness, /metrics serves Prometheus.
    Several processes may serve one store: each alert is delivered once.
    """
    at = _address(listen)
    _require_server()
    where = app_login.place(
        host,
        port,
        base_path=base_path,
        public_urls=public_url or (),
        proxies=behind_proxy or (),
        user_header=user_header,
        oidc=oidc,
    )
    dashboard = None if no_ui else _dashboard(where, store, config)
    with sigterm_as_ctrl_c(), opened(store) as source:
        try:
            with _working(source, config, engine or (), dashboard) as work:
                work.quiet_for_s = hours * HOUR_S if hours else float("inf")
                _answer(work, *at)
        except KeyboardInterrupt:
            return


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--listen {listen}: give HOST:PORT, as 127.0.0.1:9464")
    at = host.strip("[]") or "127.0.0.1"
    ui.require_free_port(at, int(port))
    return at, int(port)


def _require_server() -> None:
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "rlwatch serve")


def _dashboard(where: DashboardAddress, store: str | None, config: Path | None) -> DashboardProcess:
    ui.require_streamlit()
    ui.require_free_port(where.host, where.port)
    script, login = ui.app_script(), Login.of_user()
    ui.introduce(where, login)
    start = partial(ui.start_server, script, where, login, store, config=config)
    return DashboardProcess(start, partial(ui.healthy, where.local + where.base_path))


class DashboardProcess:
    """The dashboard as a child process, which is restarted if it ends.

    Parameters
    ----------
    start
        Starts the process and returns it.
    healthy
        Returns whether the dashboard answers.
    pauses_s
        The first and the longest pause before a restart, in seconds.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[str]],
        healthy: Callable[[], bool],
        *,
        pauses_s: tuple[float, float] = (FIRST_PAUSE_S, LONGEST_PAUSE_S),
    ) -> None:
        self._first_s, self._longest_s = pauses_s
        self.restarts = 0
        """Number of restarts after it ended by itself."""
        self._start, self._healthy = start, healthy
        self._process: subprocess.Popen[str] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(
            target=run_forever, args=(self._work, self._failed), name="rlwatch-dashboard", daemon=True
        )

    def begin(self) -> None:
        """Start the dashboard, and supervise it in a background thread."""
        self._thread.start()

    @property
    def up(self) -> bool:
        """True if the dashboard answers requests."""
        process = self._process
        return process is not None and process.poll() is None and self._healthy()

    @property
    def alive(self) -> bool:
        """True while the thread that supervises the dashboard runs."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop the dashboard, and do not restart it."""
        self._ending.set()
        self._thread.join(ui.STOP_DEADLINE_S)
        if self._process is not None:
            ui.stop_server(self._process)

    def _work(self) -> None:
        pause = self._first_s
        while not self._ending.is_set():
            began = time.monotonic()
            self._process = self._start()
            while self._process.poll() is None:
                if self._ending.wait(CHECK_S):
                    return
            lived = time.monotonic() - began
            pause = self._first_s if lived > self._longest_s else min(2.0 * pause, self._longest_s)
            log(
                logging.WARNING,
                "the dashboard ended with code %s and restarts in %g s",
                self._process.returncode,
                pause,
            )
            self._ending.wait(pause)
            self.restarts += 1

    def _failed(self, error: BaseException) -> None:
        log(logging.WARNING, "the dashboard cannot be started: %s", described(error))


class Work:
    """The services that one process runs for a store, with their health, readiness and metrics."""

    def __init__(
        self,
        store: Store,
        delivery: DeliveryThread | None,
        watch: WatchmanThread,
        dashboard: DashboardProcess | None,
        engines: MachineThread | None,
    ) -> None:
        self.quiet_for_s = float("inf")
        self.store, self.delivery, self.watch, self.dashboard, self.engines = store, delivery, watch, dashboard, engines
        self._look = GaugeCache(self._gauges)
        self._lock = threading.Lock()
        self._ready: dict[str, str] = {}
        self._ready_until = 0.0
        self._of_engines: dict[str, float] = {}

    def broken(self) -> dict[str, str]:
        """Return the services whose thread has ended, each with the reason; only a restart of the process helps."""
        threads = {"watchman": self.watch, "delivery": self.delivery, "dashboard": self.dashboard}
        return {name: "its thread has ended" for name, one in threads.items() if one is not None and not one.alive}

    def waits_for(self) -> dict[str, str]:
        """Return the services and the store that do not answer, each with the reason; at most two seconds old."""
        with self._lock:
            if time.monotonic() >= self._ready_until:
                problem = redacted(sheltered(self._store_problem, described))
                self._ready = {**self.broken(), **({"store": problem} if problem else {})}
                if self.dashboard is not None and not self.dashboard.up:
                    self._ready.setdefault("dashboard", "it does not answer")
                self._ready_until = time.monotonic() + FRESH_S
            return self._ready

    def metrics(self) -> str:
        """Return the metrics of all runs in Prometheus's text format."""
        return exposition(self._look())

    def _store_problem(self) -> str:
        """Read the store; raises if that fails."""
        self.store.runs()
        return ""

    def _gauges(self) -> list[Gauge]:
        waiting = [one for one in self.store.outbox() if one.status is OutboxStatus.PENDING]
        found: dict[str, tuple[str, float]] = {
            "serve.outbox": ("alert messages waiting for delivery", len(waiting)),
            "serve.looks": ("checks of the store", self.watch.looks),
            "serve.looks_failed": ("failed checks of the store", self.watch.failures),
        }
        if self.dashboard is not None:
            found["serve.dashboard_up"] = ("1 if the dashboard responds", self.dashboard.up)
            found["serve.dashboard_restarts"] = ("dashboard restarts", self.dashboard.restarts)
        if self.engines is not None:
            self._of_engines = self.engines.taken() or self._of_engines
            found |= {name: (meaning_of(name), value) for name, value in self._of_engines.items()}
        own = [
            Gauge(f"rlwatch.{name.replace('/', '.')}", meaning, samples=[({}, float(value))])
            for name, (meaning, value) in found.items()
        ]
        of_runs = gauges(self.store, time.time(), quiet_for_s=self.quiet_for_s)
        known = {gauge.name: gauge for gauge in of_runs}
        for gauge in own:  # a name may be both an engine's and a run's: one block for each name
            if gauge.name in known:
                known[gauge.name].samples.extend(gauge.samples)
        return [*of_runs, *(gauge for gauge in own if gauge.name not in known)]


@contextmanager
def _working(
    store: Store, config: Path | None, engines: Sequence[str], dashboard: DashboardProcess | None
) -> Iterator[Work]:
    """Run all threads and the child; they are stopped in an order that loses no message."""
    from rlwatch.monitor.watchman import WatchmanThread
    from rlwatch.run.engines import Engines, addresses
    from rlwatch.run.machine import MachineThread

    alerting = alerting_of(config, store)
    reader = Engines(addresses(engines))
    asked = MachineThread(lambda: reader.read) if engines else None
    with ExitStack() as undo:
        delivery = alerting.start(store)
        if delivery is not None:
            undo.callback(delivery.stop, LAST_ROUND_S)
        watch = WatchmanThread(watchman(store, alerting))
        watch.start()
        undo.callback(watch.stop)
        if asked is not None:
            asked.start()
            undo.callback(asked.stop)
        if dashboard is not None:
            dashboard.begin()
            undo.callback(dashboard.end)
        yield Work(store, delivery, watch, dashboard, asked)


def answers(work: Work) -> Starlette:
    """Return a Starlette application with the paths ``/healthz``, ``/readyz`` and ``/metrics`` of ``work``."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def healthz(_: Request) -> Response:
        broken = work.broken()
        return JSONResponse({"broken": broken}, 503 if broken else 200)

    def readyz(_: Request) -> Response:
        waits = work.waits_for()
        return JSONResponse({"waits_for": waits}, 503 if waits else 200)

    def metrics(_: Request) -> Response:
        return Response(work.metrics(), media_type=TYPE)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])


def _answer(work: Work, host: str, port: int) -> None:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from rlwatch.link.limits import BACKLOG, Strangers, limited, quiet_log

    settings = uvicorn.Config(
        answers(work), host=host, port=port, log_level="warning", access_log=False, lifespan="off", backlog=BACKLOG
    )
    settings.http = limited(AutoHTTPProtocol, Strangers())
    settings.timeout_graceful_shutdown = 5
    print_text(
        f"serving {work.store.url}; probes and metrics at http://{host}:{port}; stop with SIGTERM or Ctrl-C",
        style="dim",
    )
    quiet_log()
    uvicorn.Server(settings).run()
