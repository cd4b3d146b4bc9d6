"""``rlwatch demo``: start the trainer, watch the store, act, and check what was promised."""

from __future__ import annotations

import secrets
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlwatch.demo.checks import examine
from rlwatch.demo.dashboard import Dashboard
from rlwatch.demo.facts import Facts, look
from rlwatch.demo.person import Person
from rlwatch.demo.process import TrainerProcess
from rlwatch.demo.recipe import Recipe
from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.run.identity import new_run_id
from rlwatch.store.url import open_store

if TYPE_CHECKING:
    from rlwatch.demo.narrator import Narrator
    from rlwatch.ports import Store
    from rlwatch.testing.webhook_receiver import WebhookReceiver

LOOK_S = 0.25
"""Seconds between looks at the store."""
NEEDED = {"trl": "trl", "torch": "trl", "httpx": "alerts", "rich": "cli"}
"""Package -> the extra that brings it."""


def main(
    store: str | None = None,
    ui: bool = True,
    exit: bool = False,  # noqa: A002  (the name of the command's option)
    recipe: Recipe | None = None,
) -> int:
    """Run the demo; returns 0 if everything promised really happened, else 1.

    Parameters
    ----------
    store
        Where to record; a directory, since two processes share it. None: the usual store.
    ui
        Whether to start the dashboard (where streamlit is installed) and keep it open at the end.
    exit
        Whether to end at the end, dashboard and all.
    recipe
        Other numbers than the demo's own.

    Raises
    ------
    MissingExtraError
        If TRL or another part of the demo is not installed.
    ConfigError
        If ``store`` is in memory.
    """
    _require()
    opened = open_store(store)
    if opened.url.startswith("memory:"):
        raise ConfigError("the demo trains in a process of its own, so its store must be a directory")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlwatch-demo-")))
        dashboard = stack.enter_context(Dashboard(opened.url, directory)) if ui and Dashboard.possible() else None
        kept = _demonstrate(opened, directory, recipe or Recipe(), dashboard.url if dashboard else None)
        if dashboard is not None and not exit:
            _stay(dashboard)
    return 0 if kept else 1


def _demonstrate(store: Store, directory: Path, recipe: Recipe, dashboard: str | None) -> bool:
    """Train, watch, check. Whether all promises were kept."""
    from rlwatch.demo.narrator import Narrator, console
    from rlwatch.testing.webhook_receiver import WebhookReceiver

    narrator = Narrator(console(), recipe)
    run_id, secret = new_run_id("demo"), secrets.token_hex(16)
    narrator.introduce(store.url, run_id, dashboard)
    with WebhookReceiver(secret=secret) as receiver:
        trainer = TrainerProcess(store.url, run_id, directory, recipe, webhook_url=receiver.url, webhook_secret=secret)
        with trainer, narrator:
            facts = _watch(store, run_id, trainer, receiver, narrator)
        if facts is None or trainer.code != 0:
            narrator.say(f"the trainer ended with code {trainer.code}; its last words:\n{trainer.last_words()}", "red")
        if facts is None:
            return False
        checks = examine(facts, receiver.deliveries, trainer.code, recipe)
    narrator.conclude(checks)
    return all(check.kept for check in checks)


def _watch(
    store: Store, run_id: str, trainer: TrainerProcess, receiver: WebhookReceiver, narrator: Narrator
) -> Facts | None:
    """Look at the store until the trainer has ended, and once more; the last facts, if there are any."""
    person = Person(store, run_id)
    facts = None
    while True:
        ended = trainer.wait(LOOK_S) is not None
        seen = look(store, run_id)
        if seen is not None:
            facts = seen
            narrator.tell(facts, receiver.deliveries)
            if not ended:
                person.act(facts)
        if ended:
            return facts


def _stay(dashboard: Dashboard) -> None:
    """Leave the dashboard open until Ctrl-C."""
    from rlwatch.demo.narrator import console

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
