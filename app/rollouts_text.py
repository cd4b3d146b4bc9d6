"""One rollout on a page: its numbers, and its prompt and answer as plain text, folded if long."""

from __future__ import annotations

from collections.abc import Sequence

from rlwatch.rollouts import Row, TextSpan, answer, flags, reward_parts, value

from . import format as fmt
from .health import LOOKS, Word
from .markup import Markup, el, joined

HEAD, TAIL = 1600, 800
"""Characters of a long text that are visible while it is folded: at its beginning, and at its end with the answer."""
NUMBERS = {"advantage": "advantage", "length": "tokens", "repetition": "repetition", "kl": "KL"}
"""Columns shown next to the reward, and their labels."""


def text_block(text: str, marks: Sequence[TextSpan] = ()) -> Markup:
    """Return ``text`` unchanged, with ``marks`` highlighted; the middle of a long text unfolds with a click.

    The middle starts unfolded if a mark lies in it.
    """
    if len(text) <= HEAD + TAIL + 200:
        return el("div", *_marked(text, 0, marks), cls="rl-text", tabindex="0")
    middle = len(text) - TAIL
    inside = any(mark.end > HEAD and mark.start < middle for mark in marks)
    summary = el("summary", f"… {fmt.step(middle - HEAD)} more characters …")
    folded = el(
        "details", summary, *_marked(text[HEAD:middle], HEAD, marks), cls="rl-fold", open="open" if inside else ""
    )
    parts = [*_marked(text[:HEAD], 0, marks), folded, *_marked(text[middle:], middle, marks)]
    return el("div", *parts, cls="rl-text", tabindex="0")


def _marked(part: str, start: int, marks: Sequence[TextSpan]) -> list[str]:
    """Split ``part``, which begins at character ``start`` of its text, into strings and an element for each mark."""
    pieces: list[str] = []
    at = start
    for mark in marks:
        low, high = max(mark.start, at), min(mark.end, start + len(part))
        if low < high:
            pieces.append(part[at - start : low - start])
            pieces.append(el("mark", part[low - start : high - start], title=f"culprit: {mark.text}"))
            at = high
    return [*pieces, part[at - start :]]


def odd_words(row: Row) -> list[str]:
    """Return the anomalies of a rollout, including culprits, in words."""
    return [*flags(row), *([f"culprit: {row['culprit']}"] if row.get("culprit") else [])]


def facts(row: Row) -> Markup:
    """Return reward and its components, advantage, length, group and anomalies."""
    numbers = [("reward", value(row, "reward")), *reward_parts(row).items()]
    numbers += [(label, value(row, name)) for name, label in NUMBERS.items()]
    known = [(label, fmt.number(number)) for label, number in numbers if number is not None]
    words = [("group", row.get("group")), ("task", row.get("task")), ("rank", row.get("rank") or None)]
    known += [(label, fmt.shorten(str(entry), 60)) for label, entry in words if entry not in (None, "")]
    parts = [el("span", el("span", f"{label} ", cls="label"), text) for label, text in known]
    look = LOOKS[Word.AT_RISK]
    odd = [
        el("span", el("span", f"{look.shape} ", style=f"color:{look.colour}"), word, cls="rl-word")
        for word in odd_words(row)
    ]
    return el("div", *parts, *odd, cls="rl-facts")


def cut_words(row: Row) -> str:
    """Describe the part of the answer that was kept; empty if it is complete."""
    whole, kept = value(row, "chars"), len(str(row.get("completion") or ""))
    if whole is None or whole <= kept:
        return ""
    return f"{fmt.step(kept)} of {fmt.step(int(whole))} characters were stored (max_chars of KeepCompletions)"


def rollout(row: Row, marks: Sequence[TextSpan] = (), *, prompt: bool = True) -> Markup:
    """Return all recorded facts of one rollout."""
    text = str(row.get("completion") or "")
    asked = [el("div", "Prompt", cls="rl-panel"), text_block(str(row.get("prompt") or ""))]
    short = answer(text)
    final = [el("span", "  ·  ", short, cls="rl-soft")] if short and len(text) > HEAD else []
    return joined(
        facts(row),
        *(asked if prompt and row.get("prompt") else []),
        el("div", "Answer", *final, cls="rl-panel"),
        text_block(text, marks) if text else el("div", "nothing", cls="rl-soft"),
        el("div", cut_words(row), cls="rl-soft"),
    )
