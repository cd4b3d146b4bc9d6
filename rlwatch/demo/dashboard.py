"""``rlwatch ui`` beside the demo."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
STOP_S = 10.0
OWN_CHANNELS = ("RLWATCH_WEBHOOK_", "RLWATCH_CONFIG")
"""Variables by which the user's own channels would be known."""


class Dashboard:
    """The dashboard as a process of its own on a free loopback port, while its ``with`` block runs.

    Started elsewhere (``directory``) and without the webhook variables, so that no channel of the user's
    own hears of the demo.
    """

    def __init__(self, store: str, directory: Path) -> None:
        self._port, self._token = _free_port(), secrets.token_urlsafe(32)
        self._log = directory / "dashboard.log"
        self._directory = directory
        self._command = [sys.executable, "-P", "-m", "rlwatch.cli", "ui", "--store", store, "--port", str(self._port)]

    @staticmethod
    def possible() -> bool:
        """Whether what it needs is installed."""
        return all(find_spec(package) is not None for package in ("streamlit", "limits"))

    @property
    def url(self) -> str:
        """What a person opens: the link of an operator."""
        return f"http://{HOST}:{self._port}/login?token={self._token}"

    def __enter__(self) -> Self:
        away = (*OWN_CHANNELS, "RLWATCH_UI_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(away)}
        environment["RLWATCH_UI_TOKEN"] = self._token
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends this
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Until it ends or Ctrl-C."""
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
