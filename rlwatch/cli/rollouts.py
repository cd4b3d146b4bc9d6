"""Completions as a table, responses with marked culprit tokens, and properties that recur among culprits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from rlwatch.cli.console import output, print_fitting, print_text
from rlwatch.export import RECUR, Row, culprits_of, recurring
from rlwatch.ports import Store
from rlwatch.records import CULPRITS, JSON, RESPONSES, SpikeBatch
from rlwatch.rollouts import PART, Sort, among, flags, ordered
from rlwatch.rollouts import Row as RolloutRow
from rlwatch.wording import number, one_line, step

MOST_ROLLOUTS = 3
AROUND = 160
"""Characters printed before the first and after the last culprit token of a response."""
FAR = 2000
"""Most characters printed of one response."""
OPEN, CLOSE = "[[", "]]"
"""Marks around a culprit token."""


def newest_rollouts(store: Store, run_id: str) -> list[Row]:
    """Return the recorded responses with culprit tokens of the newest localised step of a run, the worst first.

    Each has ``step``, ``rank``, ``sequence``, its known properties, ``positions``, ``token_ids`` and ``texts`` of its
    tokens (empty if text was not recorded) and ``culprits``, the positions of the culprit tokens.
    """
    newest = store.spikes(run_id, last=1, reason=CULPRITS)
    if not newest:
        return []
    at = newest[-1].step
    attempt = newest[-1].attempt
    culprits = [b for b in store.spikes(run_id, reason=CULPRITS, step=at) if b.attempt == attempt]
    kept = [b for b in store.spikes(run_id, reason=RESPONSES, step=at) if b.attempt == attempt]
    found: list[Row] = []
    for batch in culprits:
        found += _rollouts(batch, next((one for one in kept if one.rank == batch.rank), None))
    return found[:MOST_ROLLOUTS]


KNOWN = ("prompt_index", "prompt", "group", "sample", "rollout", "task", "sampler_version", "reward", "reward_parts")
"""Properties of a response that are printed if they are known."""


def _rollouts(culprits: SpikeBatch, kept: SpikeBatch | None) -> list[Row]:
    """Return the responses of one rank, in the order of their worst culprits."""
    if kept is None:
        return []
    rows = culprits_of(culprits)
    found = []
    for sequence in dict.fromkeys(row.get("sequence") for row in rows):
        own = [row for row in rows if row.get("sequence") == sequence]
        here = [i for i, value in enumerate(kept.columns.get("sequence", ())) if int(value) == sequence]
        known = {name: own[0][name] for name in KNOWN if own[0].get(name) is not None}
        columns = {name: _listed(kept, name, here) for name in ("position", "token_id", "text")}
        found.append(
            {"step": culprits.step, "rank": culprits.rank, "sequence": sequence, **known}
            | {"positions": columns["position"], "token_ids": columns["token_id"], "texts": columns["text"]}
            | {"culprits": sorted(int(row["position"]) for row in own if "position" in row)}
        )
    return found


def _listed(batch: SpikeBatch, name: str, rows: Sequence[int]) -> list[JSON]:
    values = batch.columns.get(name)
    if values is None:
        return []
    return [str(values[i]) if name == "text" else int(values[i]) for i in rows]


def print_rollouts(rollouts: Sequence[Row]) -> None:
    """Print each response with its culprit tokens in double brackets; responses without recorded text are left out."""
    for one in rollouts:
        if not one["texts"]:
            continue
        print_text(
            f"step {step(one['step'])}, rank {one['rank']}, sequence {one['sequence']}{_described(one)}", style="bold"
        )
        if one.get("prompt"):
            print_text(f"  prompt: {one_line(str(one['prompt']), FAR)}")
        print_text(f"  answer: {one_line(_in_place(one), FAR + 2 * AROUND)}")


def _described(one: Row) -> str:
    """Describe a response: ``, prompt 812, group 3, sample 1, reward 0.5 (format 0, right 0.5)``."""
    parts = [f"prompt {one['prompt_index']}"] if "prompt_index" in one else []
    parts += [
        f"{name} {one_line(str(one[name]), 40)}" for name in ("group", "sample", "rollout", "task") if name in one
    ]
    if "sampler_version" in one:
        parts.append(f"sampled at step {one['sampler_version']}")
    if "reward" in one:
        parts.append(f"reward {number(one['reward'])}{_parts(one.get('reward_parts'))}")
    return "".join(f", {part}" for part in parts)


def _parts(text: JSON) -> str:
    try:
        parts = json.loads(str(text)) if text else {}
    except ValueError:
        return ""
    named = [f"{name} {number(value)}" for name, value in parts.items()] if isinstance(parts, dict) else []
    return f" ({', '.join(named)})" if named else ""


def _in_place(one: Row) -> str:
    """Return the text around the culprits, from the first to the last; missing positions are ``...``."""
    culprits, pieces, before = set(one["culprits"]), [""], None
    marks = []
    for position, text in zip(one["positions"], one["texts"], strict=True):
        if before is not None and position != before + 1:
            pieces.append(" ...")
        before = position
        if position in culprits:
            marks.append(sum(map(len, pieces)))
        pieces.append(f"{OPEN}{text}{CLOSE}" if position in culprits else text)
    whole = "".join(pieces)
    if not marks:
        return whole[:FAR]
    first, last = max(0, marks[0] - AROUND), min(len(whole), marks[-1] + AROUND)
    cut = whole[first : min(last, first + FAR)]
    return f"{'... ' if first else ''}{cut}{' ...' if first + len(cut) < len(whole) else ''}"


def recurring_rows(batches: Sequence[SpikeBatch]) -> list[Row]:
    """Return the properties that culprit tokens of several steps share; see :func:`rlwatch.export.recurring`."""
    rows = [
        {"step": batch.step, "attempt": batch.attempt, **row}
        for batch in batches
        if batch.reason == CULPRITS
        for row in culprits_of(batch)
    ]
    return [{"property": one.property, "value": one.value, "steps": one.steps, "of": one.of} for one in recurring(rows)]


def print_recurring(rows: Sequence[Row]) -> None:
    """Print the properties that recur among culprit tokens, a line for each kind of property; nothing if ``rows`` is
    empty.
    """
    if not rows:
        return
    print_text(f"Recurring over {rows[0]['of']} localised steps", style="bold")
    for name in RECUR:
        same = [f"{one_line(str(row['value']), 40)} in {row['steps']}" for row in rows if row["property"] == name]
        if same:
            print_text(f"  {name:<9} {', '.join(same)}")


# Recorded completions (texts that the model generated) as a table in the terminal: selection, order and columns.

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

    def of(self, rows: Sequence[RolloutRow]) -> list[RolloutRow]:
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


def print_completions(rows: Sequence[RolloutRow], wish: Wish, recorded: int) -> None:
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
