"""Lookup of a run in a store by the text that a user types."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.errors import ConfigError, RunNotFoundError
from rlwatch.ports import Store
from rlwatch.records import RunInfo
from rlwatch.wording import nearest

MOST_LISTED = 5


def find_run(store: Store, reference: str) -> RunInfo:
    """Return the run of ``store`` that a user means by ``reference``: an id, a name, or the beginning of one.

    An exact id precedes an exact name, and both precede a beginning. Raises ``RunNotFoundError`` with the closest ids,
    and ``ConfigError`` if several runs fit.
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


def _not_found(store: Store, runs: Sequence[RunInfo], reference: str) -> str:
    reason = store.unreadable().get(reference)
    if reason:
        return f"run {reference!r} cannot be read: {reason}"
    if not runs:
        return f"no run {reference!r}: the store {store.url} holds no runs yet"
    by_word = {word: run for run in reversed(runs) for word in (run.run_id, run.name) if word}
    close = nearest(reference, by_word, MOST_LISTED, 0.5)
    near = list({by_word[word].run_id: by_word[word] for word in close}.values())
    hint = f"did you mean {_listed(near)}?" if near else f"the newest are {_listed(runs)}"
    return f"no run {reference!r}; {hint}"
