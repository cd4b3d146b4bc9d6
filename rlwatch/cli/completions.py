"""Recorded completions (texts that the model generated) as a table in the terminal: selection, order and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from rlwatch.cli.console import output, print_fitting, print_text
from rlwatch.records import JSON
from rlwatch.rollouts import PART, Row, Sort, among, flags, ordered
from rlwatch.wording import number, one_line, step

SortOption = Annotated[
    Sort | None,
    typer.Option(
        "--sort",
        help="Completions: sort by lowest reward, length, KL or repetition; NaN first.",
        show_default="newest",
    ),
]
ReverseOption = Annotated[bool, typer.Option("--reverse", help="Completions: reverse the order of --sort.")]
FromOption = Annotated[int | None, typer.Option("--from", metavar="STEP", help="Completions: from this step on.")]
ToOption = Annotated[int | None, typer.Option("--to", metavar="STEP", help="Completions: up to this step.")]
PromptOption = Annotated[
    str, typer.Option("--prompt", metavar="ID|TEXT", help="Completions: only of this prompt (id or part of it).")
]
MostOption = Annotated[int, typer.Option("--most", min=1, metavar="N", help="Completions: rows shown.")]

MOST = 50
WIDEST = 100
"""Most characters of a prompt or completion that are printed in a cell on a wide terminal."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Selection of recorded completions (steps ``first`` to ``last``, ``prompt`` id or text), their order, and the
    most to print.
    """

    sort: Sort | None = None
    reverse: bool = False
    first: int | None = None
    last: int | None = None
    prompt: str = ""
    most: int = MOST

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the completions of ``rows`` that match this selection, sorted, each with its anomalies under
        ``flags``.
        """
        fitting = among(rows, first=self.first, last=self.last, prompt=self.prompt)
        arranged = fitting[::-1] if self.reverse else fitting
        if self.sort is not None:
            arranged = ordered(fitting, self.sort, reverse=self.reverse)
        return [row | {"flags": flags(row)} for row in arranged]


IMPORTANCE = (
    "step", "completion", "reward", "prompt", "flags", "length", "repetition", "kl", "advantage", "prompt_id", "group",
    "task", "attempt", "rank",
)  # fmt: skip
"""Columns of the completions table, the last to be dropped on a narrow terminal first; single rewards come before the
id.
"""
ROOM = 36
"""Characters reserved for the numbers of a completion, in addition to its prompt and its text."""
HIDDEN = frozenset({"chars", "generated", "prompt_index"})
"""Columns that are not printed; JSON output has them."""


def print_completions(rows: Sequence[Row], wish: Wish, recorded: int) -> None:
    """Print ``rows``, the completions selected by ``wish``, as a table, or a hint how to record some.

    ``recorded`` is the number of completions recorded for the run.
    """
    if not recorded:
        print_text("no completions recorded; they are kept only where the trainer was watched with completions=...")
        return
    if not rows:
        print_text(f"none of the {recorded} recorded completions matches")
        return
    shown = [row | {"flags": ", ".join(row["flags"])} for row in rows[: wish.most]]
    names = [name for name in dict.fromkeys(name for row in shown for name in row) if name not in HIDDEN]
    single = {name for name in ("attempt", "rank") if len({row[name] for row in rows}) == 1}
    names = [name for name in names if name not in single and not (name == "flags" and not any(r[name] for r in shown))]
    names.sort(key=_place)
    texts = {name for name in names if any(isinstance(row.get(name), str) for row in shown)}
    left = len(rows) - len(shown)
    width = min(WIDEST, max(16, (output().width - ROOM) // 2))
    print_fitting(
        [name if name in texts else f">{name}" for name in names],
        [[_cell(name, row.get(name), width) for name in names] for row in shown],
        [name for name in IMPORTANCE if name in names] + [name for name in names if name.startswith(PART)],
        title=f"Completions, {len(shown)} of {recorded}" + (f" ({left} more match: --most)" if left else ""),
    )


def _place(name: str) -> float:
    if name.startswith(PART):
        return IMPORTANCE.index("reward") + 0.5
    return IMPORTANCE.index(name) if name in IMPORTANCE else len(IMPORTANCE)


def _cell(name: str, value: JSON, width: int) -> str:
    if isinstance(value, str):
        return one_line(value, width)
    return step(value) if name == "step" else number(value)
