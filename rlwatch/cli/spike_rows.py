"""Token spikes as rows: from columns of equal length to one dictionary per token, the worst first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlwatch.cli.console import say
from rlwatch.cli.fitting import print_fitting
from rlwatch.cli.wording import number, one_line
from rlwatch.records import CULPRITS, JSON, RESPONSES, SpikeBatch

MOST_ROWS = 50
WORST_BY = ("contribution", "screen", "ratio", "advantage", "entropy")
"""The first of these columns a batch has decides which of its tokens are the worst."""
IMPORTANCE = (
    "step", "rank", "sequence", "position", "token_id", "text", "logp", "old_logp", "rollout_logp", "ratio",
    "advantage", "screen", "entropy", "ref_logp", "reason",
)  # fmt: skip
"""Columns in the order in which a narrow terminal gives them room."""


def spike_rows(batches: Sequence[SpikeBatch], most: int = MOST_ROWS) -> list[dict[str, JSON]]:
    """At most ``most`` rows, newest step first, within a step the largest (or non-finite) first.

    Not of culprits, which have rows of their own, and not of whole responses, which are no spikes.
    """
    rows: list[dict[str, JSON]] = []
    far_out = [batch for batch in batches if batch.reason not in {CULPRITS, RESPONSES}]
    for batch in sorted(far_out, key=lambda batch: batch.step, reverse=True):
        rows.extend(_worst_first(batch))
        if len(rows) >= most:
            break
    return rows[:most]


def print_token_spikes(rows: list[dict[str, JSON]]) -> None:
    """As a table, or a word that there are none."""
    if not rows:
        say("no token spikes recorded")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    if all(row["rank"] == 0 for row in rows):
        names.remove("rank")
    print_fitting(
        [name if name in {"text", "reason"} else f">{name}" for name in names],
        [[_cell(row.get(name)) for name in names] for row in rows],
        IMPORTANCE,
        title="Far-out tokens",
    )


def _cell(value: JSON) -> str:
    if isinstance(value, float) or value is None:
        return number(value)
    return one_line(value, 40)


def rows_of(batch: SpikeBatch) -> list[dict[str, JSON]]:
    """Each token of a batch with its step, rank and reason, in the order they were recorded."""
    columns = {name: values(column) for name, column in batch.columns.items()}
    return [
        {"step": batch.step, "rank": batch.rank, "reason": batch.reason}
        | {name: column[index] for name, column in columns.items()}
        for index in range(len(batch))
    ]


def _worst_first(batch: SpikeBatch) -> list[dict[str, JSON]]:
    rows = rows_of(batch)
    decisive = next((name for name in WORST_BY if name in batch.columns), None)
    return rows if decisive is None else sorted(rows, key=lambda row: -_badness(row[decisive], decisive))


def values(column: object) -> list[JSON]:
    """A column's values as plain Python."""
    tolist = getattr(column, "tolist", None)
    return list(tolist()) if tolist is not None else list(column)  # type: ignore[call-overload]


def _badness(value: float, name: str) -> float:
    """How far out a value is: a ratio of 1/8 is as far from 1 as a ratio of 8; NaN is beyond all."""
    if math.isnan(value):
        return math.inf
    if name == "ratio":
        return abs(math.log(value)) if value > 0 else math.inf
    return abs(value)
