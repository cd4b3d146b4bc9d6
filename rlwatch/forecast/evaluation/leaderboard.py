"""The leaderboard's page: evaluations as sections, how they were made, how to add to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlwatch.forecast.evaluation.pages import facts, pages

_HEAD = """\
# Leaderboard: forecasting failures of RLVR runs

Made by `rlwatch forecast leaderboard`; do not edit it by hand. Runs are real policy-gradient training with a fault (or
none) at a known step; labels, budgets and every term are defined in [the protocol](forecast-evaluation.md). Every table
holds tools that look at nothing (silence, noise, a clock): what a tool does not beat, it does not know.
"""
_TAIL = """\
## Add a tool

Write its scores on the rows of the table, one row a step, using the rows up to that step only: CSV or Parquet with
`run, step, score` (the higher the worse; leave a cell empty where it has no forecast), or `run, step, alarm` (0 or 1)
for a tool without a dial; optionally `p20, p50, p100`, the chance of a failure within so many steps. Then

    rlwatch forecast evaluate TABLE --split run --scores NAME=FILE

A tool that is fitted to runs is fitted once for each fold, to the runs outside it: `folds_of(table, split)` of
`rlwatch.forecast.evaluation` says which run is in which. One setting serves all runs, and no recipe, configuration or
length of a run may be read.

## Add runs

A row a logged step: `run`, `recipe`, `family`, `step`, metrics by their canonical names (names of TRL, verl, OpenRLHF
and others are read), and hidden columns for labels: `truth/acc`, `truth/nan`, `truth/skipped`. A second table,
NAME-runs, says `recipe`, `family` and `pair` of each run. Label them with `rlwatch forecast label TABLE`, or give
labels of your own (`run_id, severity, onset_step`; `repo`, to judge by repository as well) with `--index`.
"""


def page(evaluations: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The whole page, from (title, evaluation) pairs; a title "" is made from the split."""
    parts = [_HEAD]
    for title, evaluation in evaluations:
        about = evaluation["about"]
        made = f"`{about['command']}`, rlwatch {about['rlwatch']}" if "command" in about else "the scorer"
        parts += [f"## {title or _title(about)}\n", f"{facts(about)} Made by {made}.\n"]
        parts += [table.markdown() for table in pages(evaluation)]
    return "\n".join([*parts, _TAIL])


def _title(about: Mapping[str, Any]) -> str:
    titles = {"run": "Known recipes", "recipe": "Recipes held out", "family": "Families held out"}
    return titles.get(about["split"], "External runs")
