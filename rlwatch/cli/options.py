"""Options that several commands share, and what they stand for: a store, one run of it, a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.ports import RunReader, Store
from rlwatch.records import RunInfo

if TYPE_CHECKING:
    from rlwatch.alerts.rules import Rule
    from rlwatch.run.alerting import Alerting


class Format(StrEnum):
    """Form in which a command prints."""

    TEXT = "text"
    JSON = "json"


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RLWATCH_STORE",
        metavar="URL",
        help="Where the runs are: a directory or sqlite:///path.",
        show_default="./rlwatch-runs",
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="text for people; json for scripts: strict JSON alone on stdout, with NaN and the infinities as "
        'the strings "NaN", "Infinity", "-Infinity".',
    ),
]
LogArgument = Annotated[
    Path,
    typer.Argument(
        metavar="LOG",
        help="A log of any trainer rlwatch reads: console text, JSON lines, trainer_state.json, CSV, a wandb file, "
        "TensorBoard's event files or their directory...",
    ),
]
RunOfLogOption = Annotated[str | None, typer.Option("--run", metavar="ID", help="Which run of a log with several.")]
ReadAsOption = Annotated[
    str | None,
    typer.Option("--as", metavar="FORMAT", help="Read the log as this format.", show_default="found out by looking"),
]
TrainerOption = Annotated[
    str,
    typer.Option("--source", metavar="TRAINER", help="The trainer (trl/grpo, verl...), where the log does not tell."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Alert rules and channels from this rlwatch.toml.",
        show_default="RLWATCH_CONFIG, else ./rlwatch.toml",
    ),
]


def examples(*lines: str) -> str:
    """The epilog of a command: each example on its own line."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))


# Opening the store a command was pointed at, and closing it again.


@contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """The store at ``url`` (``None``: ``RLWATCH_STORE``, else ``./rlwatch-runs``), closed afterwards."""
    from rlwatch.store.url import open_store

    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


# From what a person types to one run of a store.

MOST_LISTED = 5


def find_run(store: RunReader, reference: str) -> RunInfo:
    """The run whose id is ``reference``, or else the only one whose name is, or whose id or name starts so.

    Raises ``RunNotFoundError`` with the closest ids, ``ConfigError`` if several runs fit.
    """
    runs = store.runs()
    for fits in (_with_id, _with_name, _with_prefix):
        found = fits(runs, reference) if reference else []
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(f"{reference!r} fits {len(found)} runs: {_listed(found)}; give the id")
    raise RunNotFoundError(_not_found(store, runs, reference))


def _with_id(runs: Sequence[RunInfo], reference: str) -> list[RunInfo]:
    return [run for run in runs if run.run_id == reference]


def _with_name(runs: Sequence[RunInfo], reference: str) -> list[RunInfo]:
    return [run for run in runs if run.name == reference]


def _with_prefix(runs: Sequence[RunInfo], reference: str) -> list[RunInfo]:
    return [run for run in runs if run.run_id.startswith(reference) or run.name.startswith(reference)]


def _listed(runs: Sequence[RunInfo]) -> str:
    shown = [f"{run.run_id} ({run.name})" if run.name else run.run_id for run in runs[:MOST_LISTED]]
    return ", ".join([*shown, "..."] if len(runs) > MOST_LISTED else shown)


def _not_found(store: RunReader, runs: Sequence[RunInfo], reference: str) -> str:
    reason = store.unreadable().get(reference)
    if reason:
        return f"run {reference!r} cannot be read: {reason}"
    if not runs:
        return f"no run {reference!r}: the store holds no runs yet"
    by_word = {word: run for run in reversed(runs) for word in (run.run_id, run.name) if word}
    close = get_close_matches(reference, by_word, n=MOST_LISTED, cutoff=0.5)
    near = list({by_word[word].run_id: by_word[word] for word in close}.values())
    hint = f"did you mean {_listed(near)}?" if near else f"the newest are {_listed(runs)}"
    return f"no run {reference!r}; {hint}"


# What ``--config`` names, or the ``rlwatch.toml`` of this directory.


def rules_of(config: Path | None) -> Sequence[Rule]:
    """The rules of the file, the default rules where there is none. Raises ``ConfigError``."""
    from rlwatch.alerts.config import load_config

    return load_config(config).rules


def alerting_of(config: Path | None, store: Store) -> Alerting:
    """Rules and channels as a trainer that uses ``store`` here would have them. Raises ``ConfigError``."""
    from rlwatch.run.alerting import alerting_for

    return alerting_for(config_file=config, webhook_url=None, rules=None, store=store)
