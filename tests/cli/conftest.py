"""The command line as a script sees it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Inbox, Invoke
from installations import Installations
from typer.testing import CliRunner, Result

VARIABLES = (
    "RLWATCH_STORE",
    "RLWATCH_WEBHOOK_URL",
    "RLWATCH_WEBHOOK_SECRET",
    "RLWATCH_DEBUG",
    "RLWATCH_RUN_ID",
    "RLWATCH_UI_TOKEN",
    "RLWATCH_UI_TOKEN_FILE",
    "RLWATCH_UI_VIEWER_TOKEN",
    "RLWATCH_UI_VIEWER_TOKEN_FILE",
)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No store, webhook, token or debug flag of the machine that runs the tests leaks in, and no secret out."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLWATCH_STATE_DIR", str(tmp_path / ".state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def invoke() -> Invoke:
    """Run ``rlwatch`` with these arguments."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> Result:
        from rlwatch.cli.app import app

        return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)

    return run


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    """The receiver of the webhook that the environment configures."""
    receiver = Inbox()
    monkeypatch.setenv("RLWATCH_WEBHOOK_URL", receiver.url)
    yield receiver
    receiver.close()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installations:
    """``installed(name, version)``: as if that were what is installed."""
    return Installations(tmp_path / "site", monkeypatch)
