"""``rlwatch serve``: one process for a team, asked over HTTP, ended by SIGTERM, twice on one database."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from cli_helpers import Invoke, record_run
from postgres_server import PostgresServer
from prometheus_client.parser import text_string_to_metric_families

import rlwatch
from rlwatch.cli.serve import DashboardProcess
from rlwatch.cli.ui import free_port
from rlwatch.records import OutboxStatus, RunState
from rlwatch.store.url import open_store
from rlwatch.testing.webhook_receiver import WebhookReceiver

ROOT = Path(rlwatch.__file__).parent.parent


def until(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)
    return found


def asked(url: str) -> tuple[int, str]:
    """Status and body; 0 where nobody answers yet."""
    try:
        with urlopen(url, timeout=10.0) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refusal:
        return refusal.code, refusal.read().decode()
    except (URLError, OSError):
        return 0, ""


class Served:
    """A process of ``rlwatch serve``."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.at = f"127.0.0.1:{free_port('127.0.0.1')}"
        command = [sys.executable, "-m", "rlwatch.cli", "serve", "--listen", self.at, *arguments]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, path: str) -> tuple[int, str]:
        assert self.process.poll() is None, self.process.communicate()[0]
        return asked(f"http://{self.at}{path}")

    def value(self, name: str) -> float:
        families = text_string_to_metric_families(self.ask("/metrics")[1])
        return next(sample.value for family in families for sample in family.samples if sample.name == name)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """``start(*arguments, **environment)``; whatever still runs at the end is killed."""
    started: list[Served] = []

    def begin(*arguments: str, **environment: str) -> Served:
        started.append(Served(*arguments, **environment))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.thorough
def test_a_dashboard_that_is_killed_comes_back_and_sigterm_ends_all_of_it(tmp_path: Path, start: Any) -> None:
    """The real one. It is not ready in between, and nothing is left behind."""
    record_run(open_store(str(tmp_path)), "math-1", reward=float("nan"))
    served = start("--store", str(tmp_path), "--port", str(free_port("127.0.0.1")), "--hours", "0")
    until(lambda: served.ask("/readyz")[0] == 200)
    assert served.ask("/healthz") == (200, '{"broken":{}}')
    assert served.value("rlwatch_run_nonfinite") == 1.0
    (child,) = children(served.process.pid)

    os.kill(child, signal.SIGKILL)
    waits = until(lambda: served.ask("/readyz")[0] == 503 and json.loads(served.ask("/readyz")[1])["waits_for"])
    assert set(waits) == {"dashboard"}
    assert served.ask("/healthz")[0] == 200, "it looks after it: no reason to restart the whole"
    until(lambda: served.ask("/readyz")[0] == 200)

    assert served.value("rlwatch_serve_dashboard_restarts") == 1.0
    (child,) = children(served.process.pid)
    assert served.end() == 0
    assert not Path(f"/proc/{child}").exists()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    server.start()
    yield server
    server.remove()


def test_two_processes_on_one_database_tell_of_a_crash_once_and_wait_while_it_is_away(
    postgres: PostgresServer, start: Any
) -> None:
    """Both look after it, both may deliver: leases and ids decide. A store that is away is no reason to be restarted."""
    url = postgres.url()
    store = open_store(url)
    names = [f"run-{i}" for i in range(6)]
    for name in names:
        record_run(store, name, state=None)
        writer = store.open_run(store.run(name))
        writer.finish(RunState.CRASHED, "CUDA error", time.time())
        writer.close()
    with WebhookReceiver() as receiver:
        both = [start("--no-ui", "--store", url, RLWATCH_WEBHOOK_URL=receiver.url) for _ in range(2)]
        until(lambda: all(one.ask("/readyz")[0] == 200 for one in both))
        until(lambda: len(receiver.received) >= len(names))
        until(lambda: all(one.value("rlwatch_serve_looks") >= 1.0 for one in both))
        until(lambda: {message.status for message in store.outbox()} == {OutboxStatus.SENT})
        store.close()

        postgres.stop()
        until(lambda: all(one.ask("/readyz")[0] == 503 for one in both))
        assert list(json.loads(both[0].ask("/readyz")[1])["waits_for"]) == ["store"]
        assert [one.ask("/healthz")[0] for one in both] == [200, 200]
        postgres.start()
        until(lambda: all(one.ask("/readyz")[0] == 200 for one in both))

        assert [one.end() for one in both] == [0, 0]
        told = sorted(str(one.payload["run"]["id"]) for one in receiver.received)  # type: ignore[index,call-overload]
    assert told == names


def test_a_child_that_ends_is_started_anew_until_it_is_to_end() -> None:
    """Ever less often; one that cannot be started at all is tried again, too."""
    started: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(["true" if len(started) < 3 else "cat"], stdin=subprocess.PIPE, text=True))
        return started[-1]

    dashboard = DashboardProcess(begin, lambda: True, pauses_s=(0.01, 0.05))
    dashboard.begin()
    until(lambda: dashboard.restarts == 3 and dashboard.up)
    dashboard.end()

    assert [one.poll() for one in started] == [0, 0, 0, -signal.SIGTERM]
    assert not dashboard.alive


@pytest.mark.parametrize("listen", ["9464x", "host", "127.0.0.1:0", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(invoke: Invoke, listen: str) -> None:
    """With the value, and what to give."""
    result = invoke("serve", "--no-ui", "--listen", listen)

    assert result.exit_code == 2
    assert listen in result.stderr
    assert "HOST:PORT" in result.stderr


# What deploys it: checked by the linters of each, and every option there is one that the command has.

DEPLOY = ROOT / "deploy"


def options(text: str) -> list[str]:
    return [word for word in shlex.split(text) if word.startswith("--")]


def commands() -> dict[str, list[str]]:
    import yaml

    unit = (DEPLOY / "rlwatch.service").read_text()
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (pod,) = [
        one
        for one in yaml.safe_load_all((DEPLOY / "kubernetes/rlwatch.yaml").read_text())
        if one["kind"] == "Deployment"
    ]
    (docker,) = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("CMD ")]
    return {
        "systemd": shlex.split(start.partition(" ")[2]),
        "compose": compose["services"]["rlwatch"]["command"],
        "kubernetes": pod["spec"]["template"]["spec"]["containers"][0]["args"],
        "docker": json.loads(docker.removeprefix("CMD ")),
    }


@pytest.mark.parametrize("where", ["systemd", "compose", "kubernetes", "docker"])
def test_what_is_started_is_a_command_that_exists(where: str) -> None:
    """With its options."""
    from typer.main import get_command

    from rlwatch.cli.app import app

    name, *arguments = commands()[where]
    known = get_command(app).commands[name]  # type: ignore[attr-defined]
    context = known.make_context(name, [one.replace("${", "").replace("}", "") for one in arguments])

    assert context.params["listen"].endswith(":9464")


def test_the_manifests_are_what_kubernetes_takes() -> None:
    """Every field is one of its schema; probes ask what is answered."""
    import kubernetes_validate
    import yaml

    found = list(yaml.safe_load_all((DEPLOY / "kubernetes/rlwatch.yaml").read_text()))
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    (pod,) = [one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"]
    (container,) = pod["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness", "startup")]
    assert probes == ["/healthz", "/readyz", "/healthz"]

    broken = {**found[1], "spec": {**found[1]["spec"], "port": 80}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_the_compose_file_is_what_compose_takes() -> None:
    """By the schema of its specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]

    done = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "ok -- validation done")


def test_the_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    """With a program and a user that this machine has; where there is no systemd, its sections at least."""
    import configparser
    import shutil

    unit = (DEPLOY / "rlwatch.service").read_text()
    here = unit.replace("/opt/rlwatch/bin/rlwatch", sys.executable).replace("User=rlwatch", "User=root")
    (tmp_path / "rlwatch.service").write_text(here)
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit)
    assert parsed.sections() == ["Unit", "Service", "Install"]
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        done = subprocess.run(
            [analyze, "verify", "--man=no", tmp_path / "rlwatch.service"], capture_output=True, text=True, check=False
        )
        assert [line for line in done.stderr.splitlines() if "rlwatch.service" in line] == []
