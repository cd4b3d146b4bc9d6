"""Tells what happens while it happens: a progress bar, and a line for every piece of news in the store."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlwatch.demo.checks import Check, Delivered
from rlwatch.demo.facts import ENTROPY, KL, REWARD, Facts
from rlwatch.demo.recipe import Recipe
from rlwatch.records import AlertState, CommandStatus, Severity

STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
ANSWERED = {CommandStatus.DONE: "green", CommandStatus.REJECTED: "magenta", CommandStatus.EXPIRED: "red"}
MILESTONE = 50
"""Steps between lines that say how the run is."""
RECENT = 10
PIPE_WIDTH = 160
"""Columns where nobody watches: a log file needs no folded cells."""


def console() -> Console:
    """Where the demo speaks: stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


class Narrator:
    """Prints each piece of news once. Used as a context manager around the training."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._recipe = recipe
        self._told: set[object] = set()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task("training", total=recipe.steps, state="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def introduce(self, store_url: str, run_id: str, dashboard: str | None) -> None:
        """What will happen, before it does."""
        recipe = self._recipe
        self.say(
            "A tiny language model learns to sort digits: a real GRPO run of TRL in a process of its own. Everything "
            "below is read from its store."
        )
        self.say(
            f"Its learning-rate schedule holds a slip: a range test, forgotten at step {recipe.range_test_step}, lets "
            f"the rate grow by {recipe.range_test_growth - 1:.0%} a step. One to three minutes."
        )
        self.say(f"store {store_url}, run {run_id}", "dim")
        if dashboard is not None:
            self.say(f"dashboard {dashboard} (a few seconds from now)", "dim")

    def say(self, text: str, style: str = "") -> None:
        """One line above the progress bar."""
        self._console.print(Text(text, style), soft_wrap=True)

    def tell(self, facts: Facts, deliveries: Sequence[Delivered]) -> None:
        """Whatever is new since the last look."""
        self._progress.update(self._bar, completed=facts.step, state=_state(facts))
        for key, text, style in [*_news(facts), *_post(deliveries), *self._milestones(facts)]:
            if key not in self._told:
                self._told.add(key)
                self.say(text, style)

    def conclude(self, checks: Sequence[Check]) -> None:
        """The checklist."""
        table = Table(title="what was promised", title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        table.add_column("promise")
        table.add_column("evidence", overflow="fold")
        for check in checks:
            mark = Text("yes", "green") if check.kept else Text("NO", "bold red")
            table.add_row(mark, Text(check.promise), Text(check.evidence))
        self._console.print(table)

    def _milestones(self, facts: Facts) -> Iterator[tuple[object, str, str]]:
        passed = facts.step // MILESTONE * MILESTONE
        if passed:
            yield ("milestone", passed), f"step {facts.step:4d}  {_state(facts)}", "dim"


def _state(facts: Facts) -> str:
    if not facts.step:
        return "starting"
    first = facts.step - RECENT + 1
    reward, entropy, kl = (facts.level(name, first) for name in (REWARD, ENTROPY, KL))
    return f"reward {reward:5.2f}  entropy {entropy:6.4f}  KL {kl:5.3f}"


def _news(facts: Facts) -> Iterable[tuple[object, str, str]]:
    """Key, line and style of all that findings, commands and alerts have to say, in that order."""
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
