"""The dashboard's process: started for the store, away from the user's own channels, ended with the demo."""

import sys
from pathlib import Path

import pytest

from rlwatch.demo.run import DemoDashboard


def stand_in(tmp_path, program):
    """A dashboard whose command is replaced by ``program``."""
    dashboard = DemoDashboard("sqlite:///runs", tmp_path)
    dashboard.command = [sys.executable, "-c", program]
    return dashboard


def test_it_is_the_ordinary_command_on_a_loopback_port(tmp_path):
    """What a user would type, with the store given; the token goes by the environment, which others cannot read."""
    dashboard = DemoDashboard("sqlite:///runs", tmp_path)

    assert dashboard.command[1:7] == ["-P", "-m", "rlwatch.cli", "ui", "--store", "sqlite:///runs"]
    address, token = dashboard.url.split("/login?token=")
    assert address == f"http://127.0.0.1:{dashboard.command[-1]}"
    assert len(token) == 43
    assert token not in " ".join(dashboard.command)


def test_its_link_is_that_of_an_operator(tmp_path, monkeypatch):
    """Whatever token the user has set for dashboards of their own."""
    monkeypatch.setenv("RLWATCH_UI_TOKEN_FILE", "/elsewhere")
    program = "import os; print(sorted((n, v) for n, v in os.environ.items() if n.startswith('RLWATCH_UI')))"

    with stand_in(tmp_path, program) as dashboard:
        dashboard.wait()

    token = dashboard.url.split("token=")[1]
    assert (tmp_path / "dashboard.log").read_text() == f"{[('RLWATCH_UI_TOKEN', token)]}\n"


def test_the_webhook_of_the_user_does_not_reach_it(tmp_path, monkeypatch):
    """Else it would deliver the demo's alarms to a real channel. It runs where no rlwatch.toml lies, too."""
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", "https://real.example/hook")
    monkeypatch.setenv("RLWATCH_WEBHOOK_SECRET", "real")
    monkeypatch.setenv("RLWATCH_CONFIG", "/home/me/rlwatch.toml")
    ours = "('RLWATCH_WEBHOOK', 'RLWATCH_CONFIG')"
    program = f"import os; print(os.getcwd(), sorted(n for n in os.environ if n.startswith({ours})))"

    with stand_in(tmp_path, program) as dashboard:
        dashboard.wait()

    where, found = (tmp_path / "dashboard.log").read_text().split()
    assert Path(where) == tmp_path.resolve()
    assert found == "[]"


def test_leaving_ends_it(tmp_path):
    """It does not outlive the demo, whatever made us leave."""
    with (
        pytest.raises(KeyboardInterrupt),
        stand_in(tmp_path, "import threading; threading.Event().wait()") as dashboard,
    ):
        raise KeyboardInterrupt

    assert dashboard.process.returncode is not None
