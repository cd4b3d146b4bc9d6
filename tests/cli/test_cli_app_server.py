"""Starting the dashboard: where it may listen, what it is told, whether it answers."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlwatch.cli import ui
from rlwatch.cli.app_login import Login, LoginToken, place
from rlwatch.errors import ConfigError, MissingExtraError


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    """Naming the port and the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            ui.require_free_port("127.0.0.1", port)


def test_a_free_port_can_be_listened_on() -> None:
    """The one that --check uses."""
    ui.require_free_port("127.0.0.1", ui.free_port("127.0.0.1"))


@pytest.mark.parametrize("place", ["rlwatch/_app", "app"])
def test_the_app_is_found_in_a_wheel_and_in_a_checkout(place: str, tmp_path: Path) -> None:
    """Only the wheel has it inside the package."""
    main = tmp_path / place / "main.py"
    main.parent.mkdir(parents=True)
    main.touch()

    assert ui.app_script(tmp_path / "rlwatch") == main


def test_a_missing_app_is_reported_with_both_places(tmp_path: Path) -> None:
    """A broken wheel is told from a broken checkout."""
    with pytest.raises(ConfigError, match=r"_app.*app.*reinstall"):
        ui.app_script(tmp_path / "rlwatch")


def test_a_missing_streamlit_is_answered_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings it."""
    monkeypatch.setitem(sys.modules, "streamlit", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'rlwatch-monitor\[app\]'"):
        ui.require_streamlit()


LOGIN = Login(
    {"operator": LoginToken("an operator's token"), "viewer": LoginToken("a viewer's token", "FILE")}, "a secret"
)


def handed_over(environment: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server is told: by us, and Streamlit by us."""
    return json.loads(environment["RLWATCH_UI_SETTINGS"]), json.loads(environment["RLWATCH_UI_SETTINGS_STREAMLIT"])


def test_the_server_watches_no_files_and_reports_nothing_home() -> None:
    """Nor shows it tracebacks to whoever looks, or an address without a token."""
    _, streamlit = handed_over(ui.server_environment(place("::1", 8501, base_path="/x/"), LOGIN, None))

    assert streamlit == {
        "server.address": "::1",
        "server.port": 8501,
        "server.baseUrlPath": "x",
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


def test_no_secret_stands_on_the_command_line() -> None:
    """Every user of the machine can read it. The environment is its owner's alone."""
    assert ui.server_command(Path("main.py")) == [sys.executable, "-P", "main.py"]


def test_the_server_learns_the_store_and_who_may_come_in() -> None:
    """Tokens that were set reach it by this one way only; the rest of the environment is kept."""
    given = {"PATH": "/bin", "RLWATCH_STORE": "old", "RLWATCH_UI_TOKEN": "x" * 16}

    environment = ui.server_environment(place("127.0.0.5", 80), LOGIN, "/data/runs", given)
    settings, _ = handed_over(environment)

    assert environment["RLWATCH_STORE"] == "/data/runs"
    assert (environment["PATH"], "RLWATCH_UI_TOKEN" in environment) == ("/bin", False)
    assert settings["tokens"] == {"operator": "an operator's token", "viewer": "a viewer's token"}
    assert settings["origins"] == ["http://localhost", "http://127.0.0.1", "http://[::1]", "http://127.0.0.5"]
    assert ui.server_environment(place("::1", 80), LOGIN, None, given)["RLWATCH_STORE"] == str(Path("old").absolute())


class Health(http.server.BaseHTTPRequestHandler):
    """Answers the way the class attributes say."""

    status, body = 200, b"ok"

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/_stcore/health" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that goes on until stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def health() -> Iterator[str]:
    """The address of a server that answers as :class:`Health`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_healthy_answer_ends_the_wait(sleeper: subprocess.Popen[str], health: str) -> None:
    """200 and the word ok."""
    assert ui.wait_healthy(sleeper, health, deadline_s=10.0) is None


@pytest.mark.parametrize(("status", "body"), [(503, b"ok"), (200, b"starting")])
def test_any_other_answer_is_not_health(
    status: int, body: bytes, sleeper: subprocess.Popen[str], health: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason says how long it was waited for."""
    monkeypatch.setattr(Health, "status", status)
    monkeypatch.setattr(Health, "body", body)

    assert "within 0.3 s" in str(ui.wait_healthy(sleeper, health, deadline_s=0.3))


def test_a_server_that_died_is_not_waited_for() -> None:
    """Its exit code is the reason."""
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], text=True)
    process.wait()

    assert ui.wait_healthy(process, "http://127.0.0.1:1", 60.0) == "the server ended with code 7"


def test_stopping_ends_the_process_even_if_it_does_not_listen() -> None:
    """First asked, then made to."""
    stubborn = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()

    ui.stop_server(process, deadline_s=0.2)

    assert process.returncode == -9
    process.communicate()
