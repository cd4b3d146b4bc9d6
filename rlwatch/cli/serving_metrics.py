"""``rlwatch export metrics``: publish the metrics of a store's runs for Prometheus and OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlwatch.analysis.gauges import TYPE, Gauge, exposition, gauges
from rlwatch.cli.background import sigterm_as_ctrl_c
from rlwatch.cli.console import print_text
from rlwatch.cli.options import StoreOption, examples, opened
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.link.limits import GREETING_S, Strangers
from rlwatch.metrics import BY_NAME

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

EPILOG = examples(
    "rlwatch export metrics > /var/lib/node_exporter/rlwatch.prom",
    "rlwatch export metrics --listen 127.0.0.1:9464",
    "rlwatch export metrics --otlp http://collector:4318",
)
PATH = "/metrics"
FRESH_S = 1.0
"""Seconds for which the metrics are cached, so that concurrent requests do not each read the store."""
HOUR_S = 3600.0
PAUSE_S = 0.1
"""Seconds until another try to accept a connection when no file descriptor is free."""


def metrics(
    *,
    store: StoreOption = None,
    hours: Annotated[
        float, typer.Option("--hours", min=0.0, help="Only runs seen within this many hours; 0: all runs.")
    ] = 24.0,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help=f"Serve Prometheus metrics at {PATH} until stopped.")
    ] = "",
    otlp: Annotated[
        str,
        typer.Option(
            "--otlp", metavar="URL", help="Push to an OpenTelemetry collector (OTLP over HTTP) until stopped."
        ),
    ] = "",
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between pushes.")] = 15.0,
) -> None:
    """Print the Prometheus metrics of a store's runs, serve them, or push them to OpenTelemetry.

    Last values under rlwatch's metric names, and step, silence, verdict and urgency of each run: docs/prometheus.md.
    """
    if listen and otlp:
        raise ConfigError("--listen and --otlp need a process each")
    with opened(store) as source:
        look = GaugeCache(lambda: gauges(source, time.time(), quiet_for_s=hours * HOUR_S if hours else float("inf")))
        if otlp:
            _push(otlp, every, look)
        elif listen:
            _answer(listen, look)
        else:
            typer.echo(exposition(look()), nl=False)


class GaugeCache:
    """Thread-safe cache of the gauges (metric values) of a store's runs, at most one second old."""

    def __init__(self, asked: Callable[[], list[Gauge]]) -> None:
        self._asked = asked
        self._lock = Lock()
        self._found: list[Gauge] = []
        self._until = 0.0

    def __call__(self) -> list[Gauge]:
        """Return the gauges."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._found = self._asked()
                self._until = time.monotonic() + FRESH_S
            return self._found


class Scraped(BaseHTTPRequestHandler):
    """Request handler that answers ``GET /metrics`` with Prometheus metrics, and any other request with an error."""

    timeout = GREETING_S

    def __init__(self, look: GaugeCache, *args: object) -> None:
        self._look = look
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send the metrics in Prometheus's text format, or 404 for any path but ``/metrics``."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"only {PATH} is here")
            return
        body = exposition(self._look()).encode()
        self.send_response(200)
        self.send_header("Content-Type", TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its signature)
        """Log nothing, since requests come every few seconds."""


class Answering(ThreadingHTTPServer):
    """HTTP server with one thread a connection, whose number is limited by :mod:`rlwatch.link.limits`."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._strangers, self._turn = Strangers(), Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a connection; above the limit, close the one that has been silent longest."""
        with self._turn:
            self._strangers.arrived(client_address, partial(_cut, request))
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection in its own thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._turn:
                self._strangers.left(client_address)

    def get_request(self) -> Any:
        """Accept the next connection; pause if no file descriptor is free."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors from clients that disconnect or send nothing."""


def _cut(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


def server(listen: str, look: GaugeCache) -> ThreadingHTTPServer:
    """Return a server of Prometheus metrics on ``HOST:PORT``. Raises ``ConfigError`` if it cannot listen there."""
    host, _, port = listen.rpartition(":")
    try:
        return Answering((host.strip("[]") or "127.0.0.1", int(port)), partial(Scraped, look))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--listen {listen}: {error}; give HOST:PORT, as 127.0.0.1:9464") from error


def _answer(listen: str, look: GaugeCache) -> None:
    with server(listen, look) as answering, sigterm_as_ctrl_c():
        host, port = answering.server_address[:2]
        print_text(f"answering at http://{host!s}:{port}{PATH}; stop with Ctrl-C")
        try:
            answering.serve_forever()
        except KeyboardInterrupt:
            return


def _push(url: str, every: float, look: GaugeCache) -> None:
    pushing = provider(url, every, look)
    print_text(f"pushing to {url} every {every:g} s; stop with Ctrl-C")
    with sigterm_as_ctrl_c():
        try:
            while True:
                time.sleep(HOUR_S)
        except KeyboardInterrupt:
            pushing.shutdown()


def provider(url: str, every: float, look: GaugeCache) -> MeterProvider:
    """Return an OpenTelemetry provider that pushes all gauges to ``url`` at an interval, and once more at shutdown.

    ``every`` is the interval in seconds. Raises ``MissingExtraError`` without the OpenTelemetry packages.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise MissingExtraError("opentelemetry", "otel", "pushing to OpenTelemetry") from None
    exporter = OTLPMetricExporter(endpoint=f"{url.rstrip('/')}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=every * 1000)
    given = MeterProvider([reader], resource=Resource.create({"service.name": "rlwatch"}))
    _observe(given.get_meter("rlwatch"), look)
    return given


def _observe(meter: Meter, look: GaugeCache) -> None:
    """Register a gauge for each possible metric of a run, which OpenTelemetry reads at export."""
    from opentelemetry.metrics import Observation

    def observed(name: str, _options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(v, dict(labels)) for gauge in look() if gauge.name == name for labels, v in gauge.samples]

    of_runs = {f"rlwatch.run.{name}": "" for name in ("info", "urgency", "step", "nonfinite")}
    measured = {f"rlwatch.{name.replace('/', '.')}": metric.unit for name, metric in BY_NAME.items()}
    for name, unit in {**of_runs, "rlwatch.run.silence": "s", **measured}.items():
        meter.create_observable_gauge(name, [partial(observed, name)], unit=unit)
