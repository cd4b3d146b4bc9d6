"""Stages of a run's steps: the stage in which it hangs, with the stack of its training thread, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from rlwatch.control.liveness import stack_of, stage_words, stalls_now
from rlwatch.records import STAGES, RunInfo, RunState, SpikeBatch
from rlwatch.wording import duration

from . import format as fmt
from . import queries
from .markup import Markup, el, joined

STEPS = 12
"""Most steps in the timeline, the newest ones."""
BATCHES = 64
"""Most batches of stages read; each rank has one a step."""
COLOURS = {
    "sampling": "#0072B2",
    "reward": "#E69F00",
    "logprobs": "#56B4E9",
    "update": "#009E73",
    "weight_sync": "#CC79A7",
    "checkpoint": "#D55E00",
    "evaluation": "#8A8A8A",
}
OTHER = "#B8A000"
"""Colour of a stage that the training loop defined."""


def show_stall(run_id: str) -> None:
    """Draw a sentence and the stack of the training thread for each rank of the run that hangs, if any."""
    run = queries.run(run_id)
    stalls = stalls_now(run, queries.events(run_id))
    if not stalls:
        return
    st.html(joined(*(stall_line(str(stall.body.get("says", ""))) for stall in stalls)))
    with st.expander("Stacks", key="stacks"):
        for stall in stalls:
            st.code("\n".join(stack_of(stall, 40)), language=None, wrap_lines=True)


def stall_line(text: str) -> Markup:
    """Return a sentence on a hanging rank as HTML: ``Stalled  rank 0 is in stage reward since...``."""
    return el("div", el("span", "Stalled", cls="label"), fmt.shorten(text, 400), cls="rl-why")


def stage_fact(run: RunInfo, now: float) -> str:
    """Return the current stage of a live run, as ``reward for 3 min``; "" for an ended run."""
    return stage_words(run, now).removeprefix("in stage ") if run.state is RunState.RUNNING else ""


def show_timeline(run_id: str) -> None:
    """Draw a bar of stages for each rank and each of the newest steps, all but the last step's folded; nothing if no
    stages were recorded.
    """
    batches = queries.store().spikes(run_id, last=BATCHES, reason=STAGES)
    newest = sorted({(batch.attempt, batch.step) for batch in batches})[-STEPS:]
    shown = [batch for batch in batches if (batch.attempt, batch.step) in set(newest)]
    if not shown:
        return
    legend, rows = timeline(shown)
    last = sum((batch.attempt, batch.step) == newest[-1] for batch in shown)
    st.html(joined(legend, *rows[:last]))
    if len(rows) > last:
        with st.expander("Stages of the newest steps", key="stages"):
            st.html(joined(*rows[last:]))


def timeline(batches: Sequence[SpikeBatch]) -> tuple[Markup, list[Markup]]:
    """Return the timeline of stages in ``batches`` as HTML: a legend, and a row for each step and rank, newest first.

    The longest row fills the width. With one rank, the legend has the durations of the newest step.
    """
    rows = [(batch, [float(s) for s in batch.columns["seconds"]]) for batch in reversed(batches)]
    longest = max(sum(seconds) for _, seconds in rows) or 1.0
    names = dict.fromkeys(str(name) for batch, _ in rows for name in batch.columns["stage"])
    ranks = {batch.rank for batch in batches}
    newest = rows[0] if rows and len(ranks) == 1 else None
    took = {} if newest is None else dict(zip(map(str, newest[0].columns["stage"]), newest[1], strict=True))
    legend = el("div", *(_entry(name, took.get(name)) for name in sorted(names, key=_order)), cls="rl-legend")
    return legend, [_row(batch, seconds, longest, ranked=len(ranks) > 1) for batch, seconds in rows]


def _order(name: str) -> tuple[int, str]:
    return (list(COLOURS).index(name) if name in COLOURS else len(COLOURS), name)


def _entry(name: str, took: float | None) -> Markup:
    swatch = el("span", style=f"background:{COLOURS.get(name, OTHER)}", cls="swatch")
    return el("span", swatch, _words(name), el("span", f" {duration(took)}", cls="label") if took is not None else "")


def _words(name: str) -> str:
    return {"logprobs": "log-probs"}.get(name) or fmt.shorten(name.replace("_", " "), 40)


def _row(batch: SpikeBatch, seconds: Sequence[float], longest: float, *, ranked: bool) -> Markup:
    rank = f" · rank {batch.rank}" if ranked else ""
    label = el("div", f"step {fmt.step(batch.step)}{rank} · {duration(sum(seconds))}", cls="rl-quiet")
    parts = [
        el(
            "span",
            title=f"{_words(str(name))} {duration(took)}",
            style=f"background:{COLOURS.get(str(name), OTHER)};width:{100.0 * took / longest:.2f}%",
        )
        for name, took in zip(batch.columns["stage"], seconds, strict=True)
    ]
    return el("div", label, el("div", *parts, cls="rl-layers"), cls="rl-stages")
