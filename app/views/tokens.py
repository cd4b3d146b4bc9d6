"""Tokens of one run: which steps were localised, who did it, and the responses they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from rlwatch.records import CULPRITS, FAR_OUT, NON_FINITE, RunInfo, RunState, SpikeBatch

from .. import format as fmt
from .. import queries, shell, table, token_recurring, token_steps
from ..markup import el
from ..queries.tokens import MOST
from ..token_looks import LOOKS
from ..token_steps import Entry
from . import tokens_step

GoToRun = Callable[[str], None]
"""Leaves for the page of the run of this id."""

ROWS, ROW_PX, HEAD_PX = 8, 37, 40
"""Steps seen at once; the others by scrolling."""

LISTED = 200
"""Steps listed at most."""

NOTHING = (
    "Nothing is recorded about single tokens of this run yet. That happens when its gradient spikes or is not finite, "
    "and when tokens are far out."
)


def page(go_to_run: GoToRun) -> None:
    """The run, the step and the token named in the address."""
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run chosen: open one from the list of runs, then its tokens from its page.")
        return
    with shell.readable("This run"):
        run = queries.run(run_id)
        wanted = st.session_state.get("live", st.query_params.get("live") != "false")
        live = run.state is RunState.RUNNING and wanted
        _head(run, go_to_run)
        st.fragment(_body, run_every=shell.REFRESH_S if live else None)(run_id)


def _head(run: RunInfo, go_to_run: GoToRun) -> None:
    name, live, back = st.columns([6.4, 1.8, 1.6], vertical_alignment="bottom", gap="medium")
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project")
    shown = fmt.shorten(run.name or run.run_id, 160)
    name.html(el("div", project, shown, el("span", " · tokens", cls="rl-project"), cls="rl-name"))
    live.toggle(
        "Live",
        value=True,
        key="live",
        bind="query-params",
        disabled=run.state is not RunState.RUNNING,
        help="Look again every 5 s; off keeps the page still",
    )
    if back.button("Run", key="back", icon=":material/arrow_back:", width="stretch", help="The run's page"):
        go_to_run(run.run_id)


def _body(run_id: str) -> None:
    with shell.readable("This run"):
        run, culprits = queries.run(run_id), queries.culprits(run_id)
        entries = token_steps.entries(queries.localised(run_id), culprits, queries.far_out(run_id))
        if not entries and "step" not in st.query_params:
            st.caption(NOTHING)
            return
        shown = _shown(run_id, entries)
        if shown is None:
            return
        _stay(shown)
        _steps(entries, shown)
        tokens_step.show(run, shown)
        _recurring(culprits)


def _shown(run_id: str, entries: Sequence[Entry]) -> Entry | None:
    """What the address names, also where it is too old for the list; None where it names nothing and there is none."""
    step, attempt = st.query_params.get("step"), st.query_params.get("attempt")
    found, number = token_steps.chosen(entries, step, attempt), token_steps.numbered(step)
    if found is not None or number is None:
        return found
    batches = queries.of_step(run_id, number)
    older = token_steps.entries(
        [], [b for b in batches if b.reason == CULPRITS], [b for b in batches if b.reason in {FAR_OUT, NON_FINITE}]
    )
    return token_steps.chosen(older, step, attempt) or Entry(0, number)


def _stay(shown: Entry) -> None:
    """Name the step in the address: a newer one must not turn the page under a reader's eyes."""
    if "step" not in st.query_params:
        st.query_params["step"] = str(shown.step)


def _steps(entries: Sequence[Entry], shown: Entry) -> None:
    count = sum(entry.report is not None for entry in entries)
    st.html(el("div", _count_words(count, len(entries) - count), cls="rl-family"))
    found = token_steps.matching(entries, _causes()) if len(entries) > 1 else list(entries)
    if not found:
        st.caption("No step matches this filter.")
        return
    attempts = len({entry.attempt for entry in entries})
    rows = [token_steps.row(entry, shown, attempts) for entry in found[:LISTED]]
    high = len(rows) > ROWS
    with st.container(height=HEAD_PX + ROWS * ROW_PX if high else "content", border=False, key="steps-frame"):
        table.show("token-steps", token_steps.COLUMNS, rows, on_open=open_step)
    if len(found) > LISTED:
        st.caption(f"and {fmt.step(len(found) - LISTED)} older")


def _count_words(localised: int, others: int) -> str:
    known = [
        fmt.plural(localised, "localised step") if localised else "",
        fmt.plural(others, "step") + " with far-out tokens only" if others else "",
    ]
    return ", ".join(filter(None, known)) or "Nothing recorded"


def _causes() -> list[str]:
    chosen = st.multiselect(
        "Cause",
        list(LOOKS),
        key="cause",
        placeholder="cause",
        label_visibility="collapsed",
        bind="query-params",
        width=420,
    )
    return list(chosen)


def open_step(key: str) -> None:
    """Show the step of :attr:`Entry.key`; the token chosen before was of another."""
    attempt, _, step = key.partition(".")
    st.query_params["step"], st.query_params["attempt"] = step, attempt
    st.query_params.pop("token", None)


def _recurring(culprits: Sequence[SpikeBatch]) -> None:
    if not culprits:
        return
    st.html(el("div", "Tokens that recur as culprits", cls="rl-family"))
    again = token_recurring.recurring(culprits)
    if not again:
        st.caption(f"No token was a culprit twice, {token_recurring.scope(culprits, MOST)}.")
        return
    rows = [token_recurring.row(one) for one in again[: token_recurring.MOST]]
    table.show("recurring", token_recurring.COLUMNS, rows)
    more = f"; and {fmt.step(len(again) - len(rows))} more tokens" if len(again) > len(rows) else ""
    st.caption(f"{token_recurring.scope(culprits, MOST).capitalize()}{more}")
