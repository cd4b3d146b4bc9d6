"""Rollouts as HTML: numbers, prompt and answer of one, and the answers of two steps in two columns."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from rlwatch.rollouts import (
    PromptComparison,
    Row,
    TextSpan,
    answer,
    at_step,
    flags,
    prompts_seen,
    reward_parts,
    turns,
    value,
)

from . import format as fmt
from . import table
from .health import LOOKS, Word
from .markup import Markup, el, joined

HEAD, TAIL = 1600, 800
"""Characters of a long text that are visible while it is folded: at its beginning, and at its end with the answer."""
NUMBERS = {"advantage": "advantage", "length": "tokens", "repetition": "repetition", "kl": "KL"}
"""Columns shown next to the reward, and their labels."""


def text_block(text: str, marks: Sequence[TextSpan] = ()) -> Markup:
    """Return ``text`` unchanged as HTML, with ``marks`` highlighted; the middle of a long text unfolds with a click.

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


def flags_of(row: Row) -> list[str]:
    """Return the anomalies of a rollout in words, including the cause of its culprit tokens."""
    return [*flags(row), *([f"culprit: {row['culprit']}"] if row.get("culprit") else [])]


def facts(row: Row) -> Markup:
    """Return reward and its components, advantage, length, group and anomalies of a rollout as HTML."""
    numbers = [("reward", value(row, "reward")), *reward_parts(row).items()]
    numbers += [(label, value(row, name)) for name, label in NUMBERS.items()]
    known = [(label, fmt.number(number)) for label, number in numbers if number is not None]
    words = [("group", row.get("group")), ("task", row.get("task")), ("rank", row.get("rank") or None)]
    known += [(label, fmt.shorten(str(entry), 60)) for label, entry in words if entry not in (None, "")]
    parts = [el("span", el("span", f"{label} ", cls="label"), text) for label, text in known]
    look = LOOKS[Word.AT_RISK]
    flagged = [
        el("span", el("span", f"{look.shape} ", style=f"color:{look.colour}"), word, cls="rl-word")
        for word in flags_of(row)
    ]
    return el("div", *parts, *flagged, cls="rl-facts")


def cut_words(row: Row) -> str:
    """Return a sentence on the part of the answer that was recorded; empty if it is complete."""
    whole, kept = value(row, "chars"), len(str(row.get("completion") or ""))
    if whole is None or whole <= kept:
        return ""
    return f"{fmt.step(kept)} of {fmt.step(int(whole))} characters were stored (max_chars of KeepCompletions)"


def rollout(row: Row, marks: Sequence[TextSpan] = (), *, prompt: bool = True) -> Markup:
    """Return all recorded facts of one rollout as HTML, with ``marks`` highlighted; ``prompt``: include the prompt."""
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


# Compare prompts between two steps: prompts whose rewards changed, and the answers side by side.

APART = 50
"""Default distance in steps between the two compared steps."""
MOST_TURNS = 50
"""Most prompts in the list of a comparison."""
MOST_ANSWERS = 4
"""Most answers shown for a step."""
NOTHING_TWICE = (
    "No prompt was recorded at two steps yet. Repeated prompts appear here once the trainer samples them again."
)

COLUMNS = (
    table.TableColumn("prompt", "long"),
    table.TableColumn("change", "tight"),
    table.TableColumn("reward before", "right tight middling"),
    table.TableColumn("reward after", "right tight middling"),
    table.TableColumn("answer before", "long wide"),
    table.TableColumn("answer after", "long wide"),
)


def pair_of(rows: Sequence[Row], apart: int = APART) -> tuple[int, int] | None:
    """Return the last step with a repeated prompt, and that prompt's earlier step nearest to ``apart`` steps before.

    Returns None if no prompt was recorded twice.
    """
    twice = [seen.steps for seen in prompts_seen(rows) if len(seen.steps) > 1]
    if not twice:
        return None
    last = max(steps[-1] for steps in twice)
    before = [step for steps in twice if steps[-1] == last for step in steps[:-1]]
    return min(before, key=lambda step: (abs(last - apart - step), step)), last


def steps_of(rows: Sequence[Row]) -> list[int]:
    """Return the steps with a prompt that was also recorded at another step."""
    return sorted({step for seen in prompts_seen(rows) if len(seen.steps) > 1 for step in seen.steps})


def show_beside(rows: Sequence[Row]) -> None:
    """Draw the choice of two steps, the prompts recorded at both, and the answers to one prompt."""
    st.html(el("div", "Compare prompts between two steps", cls="rl-family"))
    usual = pair_of(rows)
    if usual is None:
        st.html(el("div", NOTHING_TWICE, cls="rl-soft"))
        return
    steps = steps_of(rows)
    one, other = st.columns(2, gap="large")
    before = _step(one, "Step", "at", steps, usual[0])
    after = _step(other, "Compared with step", "beside", steps, usual[1])
    found = turns(rows, before, after)
    if not found:
        named = f"step {fmt.step(before)} and at step {fmt.step(after)}"
        st.html(el("div", f"No prompt was recorded at both {named}.", cls="rl-soft"))
        return
    chosen = next((turn for turn in found if turn.prompt_id == st.query_params.get("which")), found[0])
    changed = sum(bool(turn.changed) for turn in found)
    both = f"{fmt.plural(len(found), 'prompt')} at both; {changed} changed in reward or answer"
    st.html(el("div", both, cls="rl-soft"))
    table.show("turns", COLUMNS, [turn_row(turn, chosen) for turn in found[:MOST_TURNS]], on_open=pick)
    if len(found) > MOST_TURNS:
        st.html(el("div", f"and {fmt.step(len(found) - MOST_TURNS)} more", cls="rl-soft"))
    _answers(rows, chosen, (before, after))


def _step(column: st.delta_generator.DeltaGenerator, label: str, key: str, steps: Sequence[int], usual: int) -> int:
    """Return the chosen step, by default the one of the address or ``usual``."""
    named = st.query_params.get(key, "")
    place = steps.index(int(named)) if named.isdecimal() and int(named) in steps else steps.index(usual)
    picked = column.selectbox(label, steps, index=place, format_func=fmt.step, key=f"choose-{key}")
    if picked != steps[place] or named:
        st.query_params[key] = str(picked)
    return int(picked)


def pick(prompt_id: str) -> None:
    """Show the answers to the prompt with the given id, by putting it into the page's address."""
    st.query_params["which"] = prompt_id


def turn_row(turn: PromptComparison, chosen: PromptComparison) -> table.TableRow:
    """Return ``turn``, a prompt that was recorded at two steps, as a table row with rewards and answers, highlighted if
    it is ``chosen``.
    """
    look = LOOKS[Word.AT_RISK if turn.changed else Word.HEALTHY]
    return table.TableRow(
        [
            table.text(fmt.shorten(turn.prompt, 160)),
            table.mark(look.shape, look.colour, turn.changed) if turn.changed else table.text("nothing"),
            table.text("" if turn.before is None else fmt.number(turn.before)),
            table.text("" if turn.after is None else fmt.number(turn.after)),
            table.text(fmt.shorten(" · ".join(turn.answers_before), 120)),
            table.text(fmt.shorten(" · ".join(turn.answers_after), 120)),
        ],
        opens=turn.prompt_id,
        chosen=turn.prompt_id == chosen.prompt_id,
    )


def _answers(rows: Sequence[Row], turn: PromptComparison, steps: tuple[int, int]) -> None:
    st.html(joined(el("div", "Prompt", cls="rl-panel"), el("div", turn.prompt, cls="rl-text", tabindex="0")))
    for column, step in zip(st.columns(2, gap="large"), steps, strict=True):
        here = at_step(rows, step, turn.prompt_id)
        head = f"Step {fmt.step(step)}, {fmt.plural(len(here), 'answer')}"
        shown = [el("div", rollout(row, prompt=False), cls="rl-rollout") for row in here[:MOST_ANSWERS]]
        more = [el("div", facts(row), cls="rl-rollout") for row in here[MOST_ANSWERS:]]
        column.html(joined(el("div", head, cls="rl-panel"), *shown, *more))
