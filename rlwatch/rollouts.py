"""Recorded completions as rows: sorting, selection, anomalies, and how the answers to a prompt changed between two
steps.

A row is a dict, column -> value, of one completion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.records import JSON, CompletionBatch

Row = dict[str, JSON]

PART = "reward/"
"""Prefix of a column that holds the reward of one reward function."""
CUT = " […] "
"""Text that replaces the middle of a shortened text."""
LOOPING = 0.5
"""Repetition score from which on a completion counts as repeating itself; prose has below 0.1."""


def completion_rows(batches: Sequence[CompletionBatch], most: int | None = None) -> list[Row]:
    """Return at most ``most`` recorded completions as rows, the newest step first, within a step in the order of
    recording.

    Each row has the columns of its batch, and ``step``, ``attempt`` and ``rank``. ``most`` None: all.
    """
    rows: list[Row] = []
    for batch in sorted(batches, key=lambda batch: batch.step, reverse=True):
        columns = {name: column_values(column) for name, column in batch.columns.items()}
        place = {"step": batch.step, "attempt": batch.attempt, "rank": batch.rank}
        rows += [place | {name: column[i] for name, column in columns.items()} for i in range(len(batch))]
    return rows[:most]


def column_values(column: object) -> list[JSON]:
    """Return the values of a column (numpy array or sequence) as a list of plain Python values."""
    tolist = getattr(column, "tolist", None)
    return list(tolist()) if tolist is not None else list(column)  # type: ignore[call-overload]


def prompt_of(row: Row) -> str:
    """Return the name of a completion's prompt: its id, or its text where an older version recorded no id."""
    return str(row.get("prompt_id") or row.get("prompt") or "")


def reward_parts(row: Row) -> dict[str, float]:
    """Return reward function -> its reward for this completion."""
    return {
        name.removeprefix(PART): float(value)
        for name, value in row.items()
        if name.startswith(PART) and isinstance(value, int | float)
    }


def value(row: Row, name: str) -> float | None:
    """Return the number in column ``name`` of a completion; None where it was not recorded, NaN where it was NaN."""
    found = row.get(name)
    return None if found is None or isinstance(found, bool | str) else float(found)


def flags(row: Row) -> list[str]:
    """Return short descriptions of anomalies of a completion: a non-finite reward, advantage or KL, repetition, or no
    text.
    """
    broken = [name for name in ("reward", "advantage", "kl") if not math.isfinite(value(row, name) or 0.0)]
    found = [f"{name} {'NaN' if math.isnan(float(row[name])) else 'infinite'}" for name in broken]
    if (value(row, "repetition") or 0.0) >= LOOPING:
        found.append("repeats itself")
    if not str(row.get("completion") or "").strip():
        found.append("empty")
    return found


# Which, and in what order.


class Sort(StrEnum):
    """Columns by which completions can be sorted, the most suspicious value first."""

    REWARD = "reward"
    """The lowest reward first."""
    LENGTH = "length"
    """The longest completion first."""
    KL = "kl"
    """The farthest from the reference model first."""
    REPETITION = "repetition"
    """The most repetitive completion first."""


def ordered(rows: Iterable[Row], sort: Sort, *, reverse: bool = False) -> list[Row]:
    """Return completions sorted by a column: NaN and infinities first, then the most suspicious, unknown values last.

    ``reverse``: the least suspicious finite values first.
    """
    sign = (1 if sort is Sort.REWARD else -1) * (-1 if reverse else 1)

    def place(row: Row) -> tuple[int, float]:
        known = value(row, sort.value)
        if known is None:
            return (2, 0.0)
        return (1, sign * known) if math.isfinite(known) else (0, 0.0)

    return sorted(rows, key=place)


def among(rows: Iterable[Row], *, first: int | None = None, last: int | None = None, prompt: str = "") -> list[Row]:
    """Return the completions of the steps ``first`` to ``last``, inclusive, whose prompt matches ``prompt``.

    ``prompt``: beginning of the prompt's id, or part of its text, in any case; empty: all. None: no limit.
    """
    wanted = prompt.casefold()
    return [
        row
        for row in rows
        if (first is None or row["step"] >= first)
        and (last is None or row["step"] <= last)
        and (not wanted or _fits(row, wanted))
    ]


def _fits(row: Row, wanted: str) -> bool:
    return prompt_of(row).casefold().startswith(wanted) or wanted in str(row.get("prompt", "")).casefold()


def best_and_worst(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most ``most`` completions with the highest and ``most`` with the lowest or a non-finite reward, each
    once.

    The highest come first and the worst last. Among equal rewards newer completions come first.
    """
    known = sorted((row for row in rows if value(row, "reward") is not None), key=lambda row: -int(row["step"]))
    worst = ordered(known, Sort.REWARD)[:most]
    finite = [row for row in known if math.isfinite(value(row, "reward") or 0.0)]
    taken = {id(row) for row in worst}
    best = [row for row in ordered(finite, Sort.REWARD, reverse=True)[:most] if id(row) not in taken]
    return best + worst[::-1]


# The same prompt at two steps.


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt of which completions were recorded: its id, its text, and the steps with completions, ascending."""

    prompt_id: str
    prompt: str
    steps: tuple[int, ...]


def prompts_seen(rows: Iterable[Row]) -> list[Seen]:
    """Return every prompt with recorded completions, those that occur at most steps first."""
    steps: dict[str, set[int]] = {}
    texts: dict[str, str] = {}
    for row in rows:
        if name := prompt_of(row):
            steps.setdefault(name, set()).add(int(row["step"]))
            texts.setdefault(name, str(row.get("prompt", "")))
    found = [Seen(name, texts[name], tuple(sorted(own))) for name, own in steps.items()]
    return sorted(found, key=lambda seen: (-len(seen.steps), seen.steps, seen.prompt_id))


def at_step(rows: Iterable[Row], step: int, prompt_id: str = "") -> list[Row]:
    """Return the completions of ``step`` (and of a prompt, if given), those with the highest reward first.

    If several attempts (processes of a resumed run) reached the step, only the last one counts.
    """
    here = [row for row in rows if row["step"] == step and (not prompt_id or prompt_of(row) == prompt_id)]
    newest = max((int(row["attempt"]) for row in here), default=1)
    return ordered((row for row in here if row["attempt"] == newest), Sort.REWARD, reverse=True)


_ANSWERS = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\}){0,400})\}"),
    re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"####[ \t]*([^\n]{1,400})"),
    re.compile(r"\banswer\b[ \t]*(?:is|:|=)[ \t]*([^\n]{1,400})", re.IGNORECASE),
)
"""Patterns of a final answer, the most specific first."""
LONGEST_ANSWER = 200


def answer(completion: str) -> str:
    r"""Return the final answer of a completion, if its form marks one; else its last line.

    >>> answer("so 2+2=4, \\boxed{4}"), answer("I say\n#### 12 "), answer("The answer is 7."), answer("a\n\nb  c\n")
    ('4', '12', '7', 'b c')
    """
    for form in _ANSWERS:
        found = form.findall(completion)
        if found:
            return " ".join(str(found[-1]).split()).rstrip(".")[:LONGEST_ANSWER]
    lines = completion.rsplit("\n", 50)[-50:]
    last = next((line for line in reversed(lines) if line.strip()), "")
    return " ".join(last.split())[-LONGEST_ANSWER:]


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """One prompt at two steps: mean rewards and answers at each, and what changed.

    Parameters
    ----------
    prompt_id, prompt
        Id and text of the prompt.
    before, after
        Mean reward of its completions; None where no completion had one, NaN where one of the rewards was NaN.
    answers_before, answers_after
        Different final answers in the completions.
    changed
        Description of the change; empty where neither the sign of the reward nor the answers changed.
    """

    prompt_id: str
    prompt: str
    before: float | None
    after: float | None
    answers_before: tuple[str, ...]
    answers_after: tuple[str, ...]
    changed: str


def turns(rows: Sequence[Row], step: int, other: int) -> list[PromptComparison]:
    """Compare every prompt that has completions at both steps (``step`` and ``other``).

    Prompts whose mean reward changed its sign come first, then those with other answers, then the unchanged ones.
    """
    found = []
    for seen in prompts_seen(rows):
        if step in seen.steps and other in seen.steps:
            before, after = (at_step(rows, at, seen.prompt_id) for at in (step, other))
            rewards = (_mean_reward(before), _mean_reward(after))
            answers = (_answers(before), _answers(after))
            changed = _changed(rewards, answers)
            found.append(PromptComparison(seen.prompt_id, seen.prompt, *rewards, *answers, changed))
    return sorted(found, key=_least_changed)


def _mean_reward(rows: Sequence[Row]) -> float | None:
    known = [reward for row in rows if (reward := value(row, "reward")) is not None]
    return sum(known) / len(known) if known else None


def _answers(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answer(str(row.get("completion", ""))) for row in rows))


def _changed(rewards: tuple[float | None, float | None], answers: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    before, after = (_sign(reward) for reward in rewards)
    if before != after:
        return f"reward {before} → {after}"
    return "" if set(answers[0]) & set(answers[1]) else "answer"


def _sign(reward: float | None) -> str:
    if reward is None:
        return "unknown"
    if math.isnan(reward):
        return "NaN"
    return "positive" if reward > 0 else "negative" if reward < 0 else "0"


def _least_changed(turn: PromptComparison) -> tuple[int, float]:
    known = turn.before is not None and turn.after is not None
    apart = abs((turn.after or 0.0) - (turn.before or 0.0)) if known else math.nan
    rank = 0 if turn.changed.startswith("reward") else 1 if turn.changed else 2
    return (rank, -math.inf if math.isnan(apart) else -apart)


# Culprits of a gradient spike in a recorded completion.


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A marked span of a text: the characters ``start`` to ``end``, and a ``text`` that explains the mark."""

    start: int
    end: int
    text: str


def marks(row: Row, culprits: Iterable[Mapping[str, JSON]]) -> list[TextSpan]:
    """Return the spans of a completion that are culprits (tokens found responsible for a gradient spike), in order.

    ``culprits``: rows of the table of spikes. A culprit is marked only where the text at its recorded position equals
    the culprit and its surroundings, and where prompt and reward match. A shortened text, or another response, has no
    marks.
    """
    text, found = str(row.get("completion", "")), []
    for culprit in culprits:
        start, token = culprit.get("text_position"), str(culprit.get("text") or "")
        before, after = (str(culprit.get(name) or "") for name in ("before", "after"))
        if not isinstance(start, int) or start < 0 or not token or not _may_hold(row, culprit):
            continue
        if text[max(0, start - len(before)) : start + len(token) + len(after)] == before + token + after:
            found.append(TextSpan(start, start + len(token), str(culprit.get("cause") or "")))
    return sorted(dict.fromkeys(found), key=lambda mark: (mark.start, mark.end))


def _may_hold(row: Row, culprit: Mapping[str, JSON]) -> bool:
    """Return False where the culprit is known to belong to another response."""
    prompts = [str(one.get("prompt") or "") for one in (row, culprit)]
    shorter = min(map(len, prompts))
    own, its = value(row, "reward"), value(dict(culprit), "reward")
    same = own is None or its is None or (math.isnan(own) and math.isnan(its)) or math.isclose(own, its, abs_tol=1e-6)
    return same and (CUT in "".join(prompts) or prompts[0][:shorter] == prompts[1][:shorter])
