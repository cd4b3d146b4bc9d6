"""Recorded completions as rows: ordered, selected, flagged; and how the answers to the same prompt changed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.records import JSON, CompletionBatch

Row = dict[str, JSON]

PART = "reward/"
"""Prefix of the column of a reward function."""
CUT = " […] "
"""Replaces the middle of a long text."""
LOOPING = 0.5
"""Repetition from which a completion repeats itself; prose has below 0.1."""


def completion_rows(batches: Sequence[CompletionBatch], most: int | None = None) -> list[Row]:
    """Return at most ``most`` completions, newest step first, in the order they were recorded."""
    rows: list[Row] = []
    for batch in sorted(batches, key=lambda batch: batch.step, reverse=True):
        columns = {name: column_values(column) for name, column in batch.columns.items()}
        place = {"step": batch.step, "attempt": batch.attempt, "rank": batch.rank}
        rows += [place | {name: column[i] for name, column in columns.items()} for i in range(len(batch))]
    return rows[:most]


def column_values(column: object) -> list[JSON]:
    """Return a column's values as plain Python."""
    tolist = getattr(column, "tolist", None)
    return list(tolist()) if tolist is not None else list(column)  # type: ignore[call-overload]


def prompt_of(row: Row) -> str:
    """Return the name of its prompt: its id, or the text where an older version recorded none."""
    return str(row.get("prompt_id") or row.get("prompt") or "")


def reward_parts(row: Row) -> dict[str, float]:
    """Return the rewards by function."""
    return {
        name.removeprefix(PART): float(value)
        for name, value in row.items()
        if name.startswith(PART) and isinstance(value, int | float)
    }


def value(row: Row, name: str) -> float | None:
    """Return a number of the completion; None where it was not recorded, NaN where it was NaN."""
    found = row.get(name)
    return None if found is None or isinstance(found, bool | str) else float(found)


def flags(row: Row) -> list[str]:
    """Return descriptions of what is unusual about the completion."""
    broken = [name for name in ("reward", "advantage", "kl") if not math.isfinite(value(row, name) or 0.0)]
    found = [f"{name} {'NaN' if math.isnan(float(row[name])) else 'infinite'}" for name in broken]
    if (value(row, "repetition") or 0.0) >= LOOPING:
        found.append("repeats itself")
    if not str(row.get("completion") or "").strip():
        found.append("empty")
    return found


# Which, and in what order.


class Sort(StrEnum):
    """Columns by which completions are sorted, the most suspicious first."""

    REWARD = "reward"
    """The worst first."""
    LENGTH = "length"
    """The longest first."""
    KL = "kl"
    """The farthest from the reference first."""
    REPETITION = "repetition"
    """Those that repeat themselves most first."""


def ordered(rows: Iterable[Row], sort: Sort, *, reverse: bool = False) -> list[Row]:
    """Sort by ``sort``: NaN and infinities first, then the most suspicious (``reverse``: least), unknown last."""
    sign = (1 if sort is Sort.REWARD else -1) * (-1 if reverse else 1)

    def place(row: Row) -> tuple[int, float]:
        known = value(row, sort.value)
        if known is None:
            return (2, 0.0)
        return (1, sign * known) if math.isfinite(known) else (0, 0.0)

    return sorted(rows, key=place)


def among(rows: Iterable[Row], *, first: int | None = None, last: int | None = None, prompt: str = "") -> list[Row]:
    """Return the rows of steps ``first`` to ``last``, and of ``prompt``: a prefix of its id, or part of its text."""
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
    """Return at most ``most`` with the highest and as many with the lowest or a non-finite reward; each once.

    Among equals, newer ones come first.
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
    """A recorded prompt: its id, its text, and the steps, ascending."""

    prompt_id: str
    prompt: str
    steps: tuple[int, ...]


def prompts_seen(rows: Iterable[Row]) -> list[Seen]:
    """Return every prompt with a name, those of most steps first."""
    steps: dict[str, set[int]] = {}
    texts: dict[str, str] = {}
    for row in rows:
        if name := prompt_of(row):
            steps.setdefault(name, set()).add(int(row["step"]))
            texts.setdefault(name, str(row.get("prompt", "")))
    found = [Seen(name, texts[name], tuple(sorted(own))) for name, own in steps.items()]
    return sorted(found, key=lambda seen: (-len(seen.steps), seen.steps, seen.prompt_id))


def at_step(rows: Iterable[Row], step: int, prompt_id: str = "") -> list[Row]:
    """Return the rows of a step (and of a prompt), of the last attempt that reached it, the best reward first."""
    here = [row for row in rows if row["step"] == step and (not prompt_id or prompt_of(row) == prompt_id)]
    newest = max((int(row["attempt"]) for row in here), default=1)
    return ordered((row for row in here if row["attempt"] == newest), Sort.REWARD, reverse=True)


_ANSWERS = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\}){0,400})\}"),
    re.compile(r"<answer>(.{0,400}?)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"####[ \t]*([^\n]{1,400})"),
    re.compile(r"\banswer\b[ \t]*(?:is|:|=)[ \t]*([^\n]{1,400})", re.IGNORECASE),
)
"""Formats of a final answer, the most specific first."""
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
    """A prompt at one step and at another: mean rewards, answers, and a description of the change.

    ``changed`` is empty where neither the sign of the reward nor the answers changed. A reward is None where no
    completion had one, NaN where one of them was.
    """

    prompt_id: str
    prompt: str
    before: float | None
    after: float | None
    answers_before: tuple[str, ...]
    answers_after: tuple[str, ...]
    changed: str


def turns(rows: Sequence[Row], step: int, other: int) -> list[PromptComparison]:
    """Compare every prompt recorded at both steps; changes of the reward's sign first, then of answers, then others."""
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
    """Characters ``start`` to ``end`` of a text, and the text about them."""

    start: int
    end: int
    text: str


def marks(row: Row, culprits: Iterable[Mapping[str, JSON]]) -> list[TextSpan]:
    """Return the culprits in the completion, by their recorded position in the text, in order.

    Only where the text at that position equals the recorded culprit and its surroundings, and prompt and reward match:
    a shortened text, or another response, has none.
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
    """Return False where the culprit's response is known to be another one."""
    prompts = [str(one.get("prompt") or "") for one in (row, culprit)]
    shorter = min(map(len, prompts))
    own, its = value(row, "reward"), value(dict(culprit), "reward")
    same = own is None or its is None or (math.isnan(own) and math.isnan(its)) or math.isclose(own, its, abs_tol=1e-6)
    return same and (CUT in "".join(prompts) or prompts[0][:shorter] == prompts[1][:shorter])
