"""Recorded completions as rows, and how a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.cli.console import print_table, say
from rlwatch.cli.spike_rows import values
from rlwatch.cli.wording import number, one_line
from rlwatch.records import JSON, CompletionBatch

MOST_ROWS = 50
WIDTH = 100


def completion_rows(batches: Sequence[CompletionBatch], most: int = MOST_ROWS) -> list[dict[str, JSON]]:
    """At most ``most`` completions, newest step first, in the order they were recorded."""
    rows: list[dict[str, JSON]] = []
    for batch in sorted(batches, key=lambda batch: batch.step, reverse=True):
        columns = {name: values(column) for name, column in batch.columns.items()}
        rows += [
            {"step": batch.step, "rank": batch.rank} | {name: column[index] for name, column in columns.items()}
            for index in range(len(batch))
        ]
    return rows[:most]


def print_completions(rows: list[dict[str, JSON]]) -> None:
    """As a table, or a word on how to record some."""
    if not rows:
        say("no completions recorded; they are kept only where the trainer was watched with completions=...")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = {name for name in names if any(isinstance(row.get(name), str) for row in rows)}
    print_table(
        [name if name in texts else f">{name}" for name in names],
        [[_cell(row.get(name)) for name in names] for row in rows],
        title="Completions",
    )


def _cell(value: JSON) -> str:
    return one_line(value, WIDTH) if isinstance(value, str) else number(value)
