"""Compare prompts between two steps: prompts whose rewards changed, and the answers side by side."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from rlwatch.rollouts import PromptComparison, Row, at_step, prompts_seen, turns

from . import format as fmt
from . import table
from .health import LOOKS, Word
from .markup import el, joined
from .rollouts_text import facts, rollout

APART = 50
"""Default distance in steps between the two compared steps."""
MOST_TURNS = 50
"""Most prompts listed."""
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
    """Draw the choice of two steps, the prompts of both, and the answers to one prompt."""
    st.html(el("div", "Compare prompts between two steps", cls="rl-family"))
    usual = pair_of(rows)
    if usual is None:
        st.html(el("div", NOTHING_TWICE, cls="rl-soft"))
        return
    steps = steps_of(rows)
    one, other = st.columns(2, gap="large")
    before = _step(one, "Step", "at", steps, usual[0])
    after = _step(other, "compared with step", "beside", steps, usual[1])
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
    """Show the answers to another prompt, by putting it into the address."""
    st.query_params["which"] = prompt_id


def turn_row(turn: PromptComparison, chosen: PromptComparison) -> table.TableRow:
    """Return a prompt as a row."""
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
