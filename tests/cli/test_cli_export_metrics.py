"""``rlwatch export metrics``: scraped, parsed and pushed for real."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml
from cli_helpers import Invoke

import rlwatch
from rlwatch.analysis.gauges import TYPE, gauges
from rlwatch.cli.options import opened
from rlwatch.cli.serving_metrics import GaugeCache, provider, server
from rlwatch.errors import ConfigError
from rlwatch.link.limits import STRANGERS
from rlwatch.metrics import BY_NAME

DOCS = Path(__file__).parents[2] / "docs" / "prometheus"
VALUES = {"reward": 0.5, "entropy": math.nan, "grad_norm": math.inf, "critic/score/mean": 1.0, "apples": 3.0}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a run that logs its metrics as TRL does, and whose name needs escaping."""
    with rlwatch.init(project="math", name='seed "3"\\', store=tmp_path / "store", source="trl/grpo") as run:
        for step in (1, 2):
            run.log(VALUES, step=step)
    return tmp_path / "store"


def samples(text: str) -> dict[str, list]:
    """Name -> samples, by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    return {family.name: family.samples for family in parser.text_string_to_metric_families(text)}


def test_a_scrape_has_last_values_by_our_names_and_the_state_of_each_run(store: Path) -> None:
    """Over HTTP; NaN and infinities as such, unknown names not at all."""
    with (
        opened(str(store)) as source,
        server("127.0.0.1:0", GaugeCache(lambda: gauges(source, time.time()))) as answering,
    ):
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{answering.server_address[1]}"
        with urlopen(f"{address}/metrics", timeout=60) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{address}/", timeout=60)
        answering.shutdown()
    found = samples(text)
    (reward,) = found["rlwatch_reward_mean"]
    (info,) = found["rlwatch_run_info"]

    assert kind == TYPE
    assert reward.value == 0.5
    assert (reward.labels["project"], reward.labels["run"]) == ("math", 'seed "3"\\')
    assert math.isnan(found["rlwatch_policy_entropy"][0].value)
    assert found["rlwatch_optim_grad_norm"][0].value == math.inf
    assert found["rlwatch_run_step"][0].value == 2
    assert (info.labels["source"], info.labels["status"]) == ("trl/grpo", "finished")
    assert not any("apples" in name for name in found)


def test_the_command_prints_the_same_once(store: Path, invoke: Invoke) -> None:
    """For a textfile collector; runs without a sign for long are left out on request."""
    printed = invoke("export", "metrics", "--store", str(store))
    (run,) = rlwatch.open(store)
    later = time.time() + 7200.0

    assert printed.exit_code == 0
    assert f'run_id="{run.run_id}"' in printed.stdout
    with opened(str(store)) as source:
        assert gauges(source, later, quiet_for_s=3600.0) == []
        assert gauges(source, later) != []


def test_an_address_that_cannot_be_listened_on_is_refused(store: Path) -> None:
    """With what to give."""
    with pytest.raises(ConfigError, match="HOST:PORT"):
        server("nonsense", GaugeCache(list))


def test_a_collector_of_opentelemetry_gets_the_same_values(store: Path) -> None:
    """Pushed by its SDK, over HTTP, decoded by its own messages."""
    pytest.importorskip("opentelemetry.sdk.metrics", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with opened(str(store)) as source, ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_address[1]}"
        provider(url, 3600.0, GaugeCache(lambda: gauges(source, time.time()))).shutdown()
        collector.shutdown()
    request = ExportMetricsServiceRequest.FromString(got[0])
    found = {m.name: m.gauge.data_points for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics}
    (reward,) = found["rlwatch.reward.mean"]

    assert reward.as_double == 0.5
    assert {pair.key: pair.value.string_value for pair in reward.attributes}["project"] == "math"
    assert found["rlwatch.run.nonfinite"][0].as_double == 2.0  # which the SDK leaves out
    assert "rlwatch.policy.entropy" not in found


def test_the_dashboard_and_the_rules_ask_for_names_that_are_exported() -> None:
    """A name that was renamed would draw nothing, for ever."""
    of_runs = {f"rlwatch_run_{name}" for name in ("info", "urgency", "silence_seconds", "step", "nonfinite")}
    given = of_runs | {"rlwatch_" + re.sub(r"\W", "_", name) for name in BY_NAME}
    asked = json.loads((DOCS / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in asked["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in asked["templating"]["list"]]
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]

    assert set(re.findall(r"rlwatch_\w+", " ".join(expressions))) - given == set()
    assert len(expressions) > 10


def test_promtool_takes_the_rules_and_what_is_scraped(store: Path, invoke: Invoke) -> None:
    """The real one."""
    promtool = shutil.which("promtool") or pytest.fail("no promtool: run 'apt-get install prometheus'")
    rules = subprocess.run(
        [promtool, "check", "rules", DOCS / "alerts.yml"], capture_output=True, text=True, check=False
    )
    text = invoke("export", "metrics", "--store", str(store)).stdout
    scraped = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)

    assert (rules.returncode, "5 rules found" in rules.stdout) == (0, True), rules.stderr
    assert "error" not in scraped.stderr.lower(), scraped.stderr


def test_silent_connections_keep_nobody_from_scraping() -> None:
    """The oldest go; what they leave is no line of a log."""
    answering = server("127.0.0.1:0", GaugeCache(list))
    with ExitStack() as undo:
        undo.enter_context(answering)
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        undo.callback(answering.shutdown)
        silent = [undo.enter_context(socket.create_connection(answering.server_address)) for _ in range(2 * STRANGERS)]
        silent[0].settimeout(60.0)
        assert urlopen(f"http://127.0.0.1:{answering.server_address[1]}/metrics", timeout=60.0).status == 200
        assert silent[0].recv(1) == b""
