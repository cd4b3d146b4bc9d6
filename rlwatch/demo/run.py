"""``rlwatch demo``: start the trainer and the dashboard, narrate, act as the user, and check the promises."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlwatch.demo import SMOLLM2, TINY, Recipe, recipe_of, smollm2
from rlwatch.demo.checks import ENTROPY, KL, REWARD, Delivered, DemoCheck, DemoFacts, Person, examine, look
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.forecast.gate import EVIDENCE_VARIABLE, Evidence
from rlwatch.records import AlertState, CommandStatus, Severity
from rlwatch.run.identity import RUN_ID_VARIABLE, new_run_id
from rlwatch.store.url import open_store
from rlwatch.view import stored_diagnosis

if TYPE_CHECKING:
    from rlwatch.ports import Store
    from rlwatch.testing.webhook_receiver import WebhookReceiver


LAST_WORDS = 3000
"""Number of characters at the end of the trainer's log that are shown if it fails."""
STOP_S = 15.0


class TrainerProcess:
    """The demo's training process, which runs while the ``with`` block is active.

    Parameters
    ----------
    store
        URL of the store; of the demo's processes only this one writes rows there.
    run_id
        Id of the new run.
    directory
        Directory for the model, the output and the log.
    recipe
        Hyperparameters of the run.
    webhook_url, webhook_secret
        Receiver of alerts; passed in the environment, not on the command line, which ``ps`` shows.
    command
        Command line to run instead of the training's.
    stop_s
        Seconds that the process has to end after the signal to stop.
    """

    def __init__(
        self,
        store: str,
        run_id: str,
        directory: Path,
        recipe: Recipe,
        *,
        webhook_url: str,
        webhook_secret: str,
        command: list[str] | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self._stop_s = stop_s
        self._log = directory / "training.log"
        config = directory / "rlwatch.toml"
        config.touch()  # empty, but found first: no alert of the demo goes to the user's own channels
        self._command = command or command_line(store, config, directory, recipe)
        self._environment = {
            **_without_ranks(os.environ),
            RUN_ID_VARIABLE: run_id,
            "RLWATCH_WEBHOOK_URL": webhook_url,
            "RLWATCH_WEBHOOK_SECRET": webhook_secret,
            "OMP_NUM_THREADS": "1",
            **({EVIDENCE_VARIABLE: Evidence.OWN.value} if recipe.model == TINY else {}),  # one of rlwatch's own models
        }

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process if it still runs: first by a signal to stop, then by force."""
        if self.code is None:
            self.process.terminate()
            try:
                self.process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def code(self) -> int | None:
        """Exit code of the training process; None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait up to ``seconds`` for the end of the training process; return its exit code, or None if
        it still runs.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the end of the training process's output."""
        return self._log.read_text(errors="replace")[-LAST_WORDS:]


def command_line(store: str, config_file: Path, directory: Path, recipe: Recipe) -> list[str]:
    """Return the command line that starts :mod:`rlwatch.demo.training` with these settings."""
    settings = json.dumps(asdict(recipe))
    return [sys.executable, "-P", "-m", "rlwatch.demo.training", store, str(config_file), str(directory), settings]


def _without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a launcher's variables: the demo is one process even in a distributed job."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in environment.items() if name not in launcher}


# ``rlwatch ui`` for the demo.

HOST = "127.0.0.1"
DASHBOARD_STOP_S = 10.0
OWN_CHANNELS = ("RLWATCH_WEBHOOK_", "RLWATCH_CONFIG")
"""Prefixes of variables that configure the user's own channels."""


class DemoDashboard:
    """The dashboard in a process of its own on a free loopback port, which runs while the ``with`` block is active.

    It starts in another ``directory`` and without the webhook variables, so that no alert of the demo goes to the
    user's own channels. ``store``: URL of the store.
    """

    def __init__(self, store: str, directory: Path) -> None:
        self._port, self._token = _free_port(), secrets.token_urlsafe(32)
        self._log = directory / "dashboard.log"
        self._directory = directory
        self.command = [sys.executable, "-P", "-m", "rlwatch.cli", "ui", "--store", store, "--port", str(self._port)]

    @staticmethod
    def possible() -> bool:
        """Return whether the packages of the dashboard are installed."""
        return all(find_spec(package) is not None for package in ("streamlit", "limits"))

    @property
    def url(self) -> str:
        """Address to open in a browser: the login link of an operator."""
        return f"http://{HOST}:{self._port}/login?token={self._token}"

    def __enter__(self) -> Self:
        removed = (*OWN_CHANNELS, "RLWATCH_UI_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
        environment["RLWATCH_UI_TOKEN"] = self._token
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
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
        self.process.terminate()
        try:
            self.process.wait(DASHBOARD_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait(self) -> None:
        """Wait until the dashboard ends, or until Ctrl-C."""
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# Narration of what happens while it happens: a progress bar, and a line for everything new in the store.

STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
ANSWERED = {CommandStatus.DONE: "green", CommandStatus.REJECTED: "magenta", CommandStatus.EXPIRED: "red"}
MILESTONE = 50
"""Steps between lines with the state of the run."""
RECENT = 10
PIPE_WIDTH = 160
"""Columns of output that is no terminal: a log file needs no folded cells."""


def console() -> Console:
    """Return the terminal console of the demo, which writes to stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


class Narrator:
    """Prints each new event of the demo once, above a progress bar; a context manager around the training.

    ``console``: where it prints. ``recipe``: hyperparameters of the run.
    """

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._recipe = recipe
        self._reported: set[object] = set()
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
        )
        self._bar = self.progress.add_task("training", total=recipe.steps, state="starting")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def introduce(self, store_url: str, run_id: str, dashboard: str | None) -> None:
        """Print an introduction to the demo with the store, the run and the dashboard's address (None:
        no dashboard).
        """
        recipe = self._recipe
        real = recipe.model == SMOLLM2
        what = "SmolLM2-135M-Instruct learns to add" if real else "A tiny language model learns to sort digits"
        lasts = "Half an hour or more on a core." if real else "One to three minutes."
        self.print(f"{what}: a real GRPO run of TRL in a process of its own. Everything below is read from its store.")
        self.print(
            f"Its learning-rate schedule holds a slip: a range test, forgotten at step {recipe.range_test_step}, lets "
            f"the rate grow by {recipe.range_test_growth - 1:.0%} a step. {lasts}"
        )
        self.print(f"store {store_url}, run {run_id}", "dim")
        if dashboard is not None:
            self.print(f"dashboard {dashboard} (a few seconds from now)", "dim")

    def print(self, text: str, style: str = "") -> None:
        """Print a line above the progress bar in a style of rich."""
        self._console.print(Text(text, style), soft_wrap=True)

    def narrate(self, facts: DemoFacts, deliveries: Sequence[Delivered]) -> None:
        """Print findings, commands, alerts and webhook requests that are new since the last call."""
        self.progress.update(self._bar, completed=facts.step, state=_state(facts))
        for key, text, style in [*_changes(facts), *_post(deliveries), *self._milestones(facts)]:
            if key not in self._reported:
                self._reported.add(key)
                self.print(text, style)

    def conclude(self, checks: Sequence[DemoCheck]) -> None:
        """Print the list of promises with the result of each check."""
        table = Table(title="what was promised", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("promise")
        table.add_column("evidence", overflow="fold")
        for check in checks:
            mark = Text("yes", "green") if check.kept else Text("NO", "bold red")
            table.add_row(mark, Text(check.promise), Text(check.evidence))
        self._console.print(table)

    def _milestones(self, facts: DemoFacts) -> Iterator[tuple[object, str, str]]:
        passed = facts.step // MILESTONE * MILESTONE
        if passed:
            yield ("milestone", passed), f"step {facts.step:4d}  {_state(facts)}", "dim"


def _state(facts: DemoFacts) -> str:
    if not facts.step:
        return "starting"
    first = facts.step - RECENT + 1
    reward, entropy, kl = (facts.level(name, first) for name in (REWARD, ENTROPY, KL))
    return f"reward {reward:5.2f}  entropy {entropy:6.4f}  KL {kl:5.3f}"


def _changes(facts: DemoFacts) -> Iterable[tuple[object, str, str]]:
    """Yield key, line and style of the findings, commands and alerts, in that order."""
    for f in facts.findings:
        yield ("finding", f.seq, f.kind, f.severity), f"step {f.step:4d}  {f.severity}  {f.message}", STYLES[f.severity]
    for c in facts.commands:
        yield ("asked", c.command_id), f"{c.requested_by} asks for {c.kind}: {c.why}", "bold"
        if c.status in ANSWERED:
            at = "" if c.finished_step is None else f"step {c.finished_step:4d}  "
            yield ("answered", c.command_id), f"{at}the trainer: {c.status}: {c.result}", ANSWERED[c.status]
    for a in reversed(facts.alerts):
        if a.state is AlertState.FIRING:
            text = f"step {a.step:4d}  ALERT {a.severity} {a.kind}: rule {a.rule} fires"
            yield ("alert", a.alert_id, a.severity), text, STYLES[a.severity]


def _post(deliveries: Sequence[Delivered]) -> Iterable[tuple[object, str, str]]:
    for number, delivery in enumerate(deliveries):
        text = delivery.payload.get("text", "?") if isinstance(delivery.payload, dict) else "?"
        signed = "signature right" if delivery.verified else "SIGNATURE WRONG"
        yield ("post", number), f"webhook received ({signed}): {text}", "blue"


LOOK_S = 0.25
"""Seconds between two reads of the store."""
NEEDED = {"trl": "trl", "torch": "trl", "httpx": "alerts", "rich": "cli"}
"""Package -> extra of rlwatch that installs it."""


def main(
    store: str | None = None,
    ui: bool = True,
    exit: bool = False,  # noqa: A002  (the name of the command's option)
    recipe: Recipe | None = None,
    model: str = TINY,
) -> int:
    """Run the demo; return the exit code: 0 if every promise was kept, else 1.

    Parameters
    ----------
    store
        Store for the run; a directory, since two processes share it. None: the usual store.
    ui
        Whether to start the dashboard (where streamlit is installed) and keep it open at the end.
    exit
        Whether to end at the end, with the dashboard.
    recipe
        Hyperparameters to use instead of the demo's own.
    model
        The model that is trained: ``tiny`` or ``smollm2``.

    Raises
    ------
    MissingExtraError
        If TRL or another part of the demo is not installed, or the weights of ``smollm2``.
    ConfigError
        If ``store`` is in memory.
    """
    recipe = recipe or recipe_of(model)
    _require()
    if recipe.model == SMOLLM2:
        smollm2.require()
    opened = open_store(store)
    if opened.url.startswith("memory:"):
        raise ConfigError("the demo trains in a process of its own, so its store must be a directory")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlwatch-demo-")))
        dashboard = (
            stack.enter_context(DemoDashboard(opened.url, directory)) if ui and DemoDashboard.possible() else None
        )
        kept = _demonstrate(opened, directory, recipe, dashboard.url if dashboard else None)
        if dashboard is not None and not exit:
            _stay(dashboard)
    return 0 if kept else 1


def _demonstrate(store: Store, directory: Path, recipe: Recipe, dashboard: str | None) -> bool:
    """Train, watch and check; return whether all promises were kept."""
    from rlwatch.testing.webhook_receiver import WebhookReceiver

    narrator = Narrator(console(), recipe)
    run_id, secret = new_run_id("demo"), secrets.token_hex(16)
    narrator.introduce(store.url, run_id, dashboard)
    with WebhookReceiver(secret=secret) as receiver:
        trainer = TrainerProcess(store.url, run_id, directory, recipe, webhook_url=receiver.url, webhook_secret=secret)
        with trainer, narrator:
            facts = _watch(store, run_id, trainer, receiver, narrator)
        if facts is None or trainer.code != 0:
            narrator.print(
                f"the trainer ended with code {trainer.code}; its last output:\n{trainer.last_words()}", "red"
            )
        if facts is None:
            return False
        diagnosis = stored_diagnosis(store, store.run(run_id))
        checks = examine(facts, diagnosis, receiver.deliveries, trainer.code, recipe)
    narrator.conclude(checks)
    return all(check.kept for check in checks)


def _watch(
    store: Store, run_id: str, trainer: TrainerProcess, receiver: WebhookReceiver, narrator: Narrator
) -> DemoFacts | None:
    """Read the store until the trainer has ended, and once more; return the last data, if there are any."""
    person = Person(store, run_id)
    facts = None
    while True:
        ended = trainer.wait(LOOK_S) is not None
        seen = look(store, run_id)
        if seen is not None:
            facts = seen
            narrator.narrate(facts, receiver.deliveries)
            if not ended:
                person.act(facts)
        if ended:
            return facts


def _stay(dashboard: DemoDashboard) -> None:
    """Leave the dashboard open until Ctrl-C."""
    console().print(f"The dashboard stays open at {dashboard.url}; Ctrl-C ends it.", style="bold")
    try:
        dashboard.wait()
    except KeyboardInterrupt:
        return
    console().print("The dashboard ended by itself; see: rlwatch ui --check", style="red")


def _require() -> None:
    for package, extra in NEEDED.items():
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, "rlwatch demo")
