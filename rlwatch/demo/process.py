"""Starting the trainer as another process, and what it said if it died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from rlwatch.demo.recipe import Recipe
from rlwatch.run.identity import RUN_ID_VARIABLE

LAST_WORDS = 3000
"""Characters of the log worth showing after a death."""
STOP_S = 15.0


class TrainerProcess:
    """The training process, from ``with`` to its end.

    Parameters
    ----------
    store
        URL of the store; the process writes there, everybody else reads.
    run_id
        The run it will be.
    directory
        For the model, the output and the log.
    webhook_url, webhook_secret
        Where alarms go; handed over in the environment, never on the command line, where ``ps`` shows them.
    """

    def __init__(
        self, store: str, run_id: str, directory: Path, recipe: Recipe, *, webhook_url: str, webhook_secret: str
    ) -> None:
        self._log = directory / "training.log"
        config = directory / "rlwatch.toml"
        config.touch()  # empty, but found first: nobody's own channels hear of a demo
        self._command = command_line(store, config, directory, recipe)
        self._environment = {
            **_without_ranks(os.environ),
            RUN_ID_VARIABLE: run_id,
            "RLWATCH_WEBHOOK_URL": webhook_url,
            "RLWATCH_WEBHOOK_SECRET": webhook_secret,
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it if it still runs, asking first."""
        if self.code is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Give it up to ``seconds`` to end; its exit code or None."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """The end of what it wrote to its output."""
        return self._log.read_text(errors="replace")[-LAST_WORDS:]


def command_line(store: str, config_file: Path, directory: Path, recipe: Recipe) -> list[str]:
    """What :mod:`rlwatch.demo.training` is started with."""
    settings = json.dumps(asdict(recipe))
    return [sys.executable, "-P", "-m", "rlwatch.demo.training", store, str(config_file), str(directory), settings]


def _without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The demo is one process even where the shell belongs to a distributed job."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if name not in launcher}
