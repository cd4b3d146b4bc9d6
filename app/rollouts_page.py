"""Page with the rollouts (generated responses) of a run: a filtered list, one in full, and a
comparison of two steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from rlwatch.export import culprits_of
from rlwatch.records import CULPRITS, RunInfo, RunState, SpikeBatch
from rlwatch.rollouts import Row, Sort, among, completion_rows, marks, ordered, reward_parts, value

from . import format as fmt
from . import layout, queries, table, token_response
from .layout import GoToRun, GoToTokens
from .markup import el, joined
from .rollouts_text import facts, flags_of, rollout, show_beside, text_block
from .tokens import culprits_of as tokens_of
from .tokens import response_of

LISTED = 100
"""Most rollouts in the list."""
ROWS, ROW_PX, HEAD_PX = 8, 56, 40
"""Rollouts visible without scrolling, and heights of a row and of the header in pixels."""
SNIPPET = 160
"""Characters of a prompt, and of the beginning and of the end of an answer, in the list."""

NEWEST = "newest"
ORDERS: Mapping[str, tuple[Sort, bool] | None] = {
    NEWEST: None,
    "worst reward": (Sort.REWARD, False),
    "best reward": (Sort.REWARD, True),
    "longest": (Sort.LENGTH, False),
    "most repeated": (Sort.REPETITION, False),
    "largest KL": (Sort.KL, False),
}
FLAGGED, BLAMED, WRONG = "flagged", "with culprits", "reward not above 0"
FILTERS: Mapping[str, Callable[[Row], bool]] = {
    FLAGGED: lambda row: bool(flags_of(row)),
    BLAMED: lambda row: bool(row.get("culprit")),
    WRONG: lambda row: not (value(row, "reward") or 0.0) > 0,
}
TASK = "task "

NOTHING = (
    "This run recorded no completions. Record them with "
    "completions=True (verl: trainer.rlwatch.completions=true), responses around culprit tokens with text=True."
)

COLUMNS = (
    table.TableColumn("step", "right tight"),
    table.TableColumn("prompt", "long wide"),
    table.TableColumn("answer", "long"),
    table.TableColumn("reward", "right tight"),
    table.TableColumn("by reward function", "tight wide"),
    table.TableColumn("advantage", "right tight wide"),
    table.TableColumn("tokens", "right tight middling"),
    table.TableColumn("repetition", "right tight wide"),
    table.TableColumn("KL", "right tight wide"),
    table.TableColumn("group", "right tight wide"),
    table.TableColumn("flags", "tight middling"),
)


def page(go_to_run: GoToRun, go_to_tokens: GoToTokens) -> None:
    """Draw the page of the run in the address: filters, the list of rollouts, and the chosen rollout.

    ``go_to_run``, ``go_to_tokens``: open the page of a run, or of the tokens of a step.
    """
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run selected. Open a run, then its rollouts.")
        return
    with layout.readable("This run"):
        run = queries.run(run_id)
        _head(run, go_to_run)
        live = run.state is RunState.RUNNING and st.session_state.get("live", True)
        st.fragment(_body, run_every=layout.REFRESH_S if live else None)(run_id, go_to_tokens)


def _head(run: RunInfo, go_to_run: GoToRun) -> None:
    if layout.run_head(run, "rollouts").button("Run", key="back", icon=":material/arrow_back:", help="Run page"):
        go_to_run(run.run_id)


def _body(run_id: str, go_to_tokens: GoToTokens) -> None:
    with layout.readable("This run"):
        found = Recorded.of(run_id)
        if not found.rows:
            st.html(el("div", NOTHING, cls="rl-soft"))
            return
        chosen = _filtered(found)
        st.html(el("div", scope(found.rows, chosen), cls="rl-soft"))
        opened = _opened(found, chosen)
        _list(chosen, opened)
        if opened is not None:
            _show(found, opened, go_to_tokens)
        show_beside([row for row in found.rows if not row.get("spike")])


# All recorded rollouts: completions, and responses that were kept because they contain culprits.


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded rollouts of a run, newest first, each with a ``key``; ``culprits``: culprit tokens by
    attempt and step.
    """

    rows: Sequence[Row]
    culprits: Mapping[tuple[int, int], Sequence[SpikeBatch]]

    @classmethod
    def of(cls, run_id: str) -> Recorded:
        """Read the rollouts of a run from the store."""
        by_step: dict[tuple[int, int], list[SpikeBatch]] = {}
        for batch in queries.culprits(run_id):
            by_step.setdefault((batch.attempt, batch.step), []).append(batch)
        kept = [blamed(row, by_step) for row in keyed(queries.completions(run_id))]
        seen = {(row["attempt"], row["step"], row["culprit_key"]) for row in kept if row.get("culprit_key")}
        spiked = [row for batches in by_step.values() for row in spiked_rows(batches)]
        others = [row for row in spiked if (row["attempt"], row["step"], row["culprit_key"]) not in seen]
        rows = sorted([*kept, *others], key=lambda row: (-row["attempt"], -row["step"]))
        return cls(rows, by_step)


def keyed(rows: Sequence[Row]) -> list[Row]:
    """Return ``rows``, each with its ``key`` for the address: attempt, step, rank, and its index among those."""
    count: Counter[tuple[int, int, int]] = Counter()
    found = []
    for row in rows:
        at = (row["attempt"], row["step"], row["rank"])
        found.append({**row, "key": ".".join(map(str, (*at, count[at])))})
        count[at] += 1
    return found


def blamed(row: Row, culprits: Mapping[tuple[int, int], Sequence[SpikeBatch]]) -> Row:
    """Return the rollout ``row``, with the cause of its culprit tokens added if it contains any."""
    for batch in culprits.get((row["attempt"], row["step"]), ()):
        for culprit in culprits_of(batch):
            if marks(row, [culprit]):
                cause = culprit.get("cause") or "unexplained"
                return {**row, "culprit": cause, "culprit_key": _response_key(batch.rank, culprit)}
    return row


def spiked_rows(batches: Sequence[SpikeBatch]) -> list[Row]:
    """Return a row for each response in ``batches`` with culprit tokens (those that dominate a gradient spike) whose
    text was recorded.

    Rows are ordered by their worst culprit.
    """
    found: dict[str, Row] = {}
    for batch in batches:
        for culprit in culprits_of(batch):
            key = _response_key(batch.rank, culprit)
            around = "".join(str(culprit.get(name) or "") for name in ("before", "text", "after"))
            if key in found or not around.strip():
                continue
            known = {
                n: culprit[n] for n in ("prompt", "reward", "advantage", "group", "task") if culprit.get(n) is not None
            }
            place = {"step": batch.step, "attempt": batch.attempt, "rank": batch.rank}
            cause = str(culprit.get("cause") or "unexplained")
            name = f"spike.{batch.attempt}.{batch.step}.{key}"
            found[key] = place | known | {"completion": around, "culprit": cause, "culprit_key": key}
            found[key] |= {"key": name, "spike": True}
    return list(found.values())


def _response_key(rank: int, culprit: Row) -> str:
    return f"{rank}.{culprit.get('microbatch', 0)}.{culprit.get('sequence', 0)}"


# Filters and order.


def _filtered(found: Recorded) -> list[Row]:
    with st.container(key="filters"):
        order, only, prompt, first, last = st.columns([2.2, 3.4, 2.6, 1.2, 1.2], vertical_alignment="bottom")
    wish = order.selectbox("Order", list(ORDERS), key="sort", bind="query-params")
    tasks = sorted({str(row["task"]) for row in found.rows if row.get("task")})
    kinds = only.multiselect(
        "Only", [*FILTERS, *(f"{TASK}{task}" for task in tasks)], key="only", bind="query-params", placeholder="all"
    )
    words = prompt.text_input("Prompt", key="prompt", bind="query-params", placeholder="id or part of it")
    span = [
        column.number_input(f"{label} step", min_value=0, value=None, step=1, key=label.lower(), bind="query-params")
        for column, label in ((first, "From"), (last, "To"))
    ]
    rows = among(found.rows, first=span[0], last=span[1], prompt=words or "")
    rows = [row for row in rows if all(_fits(row, kind) for kind in kinds)]
    how = ORDERS[str(wish or NEWEST)]
    return rows if how is None else ordered(rows, how[0], reverse=how[1])


def _fits(row: Row, kind: str) -> bool:
    known = FILTERS.get(kind)
    return known(row) if known is not None else f"{TASK}{row.get('task')}" == kind


def scope(rows: Sequence[Row], chosen: Sequence[Row]) -> str:
    """Return a sentence with the numbers of rollouts, steps, matches (``chosen``), and rollouts generated at a step."""
    steps = {(row["attempt"], row["step"]) for row in rows}
    at = f"{fmt.plural(len(rows), 'rollout')} of {fmt.plural(len(steps), 'step')}"
    fitting = "" if len(chosen) == len(rows) else f"; {fmt.step(len(chosen))} match"
    of = {int(row["generated"]) for row in rows if row.get("generated")}
    most = f"; up to {fmt.step(max(of))} generated per step" if of else ""
    return f"{at}{fitting}{most}."


# On the run's page.


def show_newest(run_id: str) -> None:
    """Draw one line on the newest rollouts of a run with a link to all of them, if there are any."""
    with layout.readable("This run"):
        newest = queries.newest_completions(run_id)
        if newest is None or not len(newest):
            return
        rewards = [reward for row in completion_rows([newest]) if (reward := value(row, "reward")) is not None]
        span = f"reward {fmt.number(min(rewards))} to {fmt.number(max(rewards))}" if rewards else ""
        link = el("a", "Rollouts", href=f"rollouts?{urlencode({'run': run_id})}", target="_self")
        kept = f"{fmt.plural(len(newest), 'answer')} of step {fmt.step(newest.step)} kept"
        words = "  " + ", ".join(filter(None, (kept, span)))
        st.html(el("div", link, words, cls="rl-why"))


# The list, and the open rollout.


def _list(rows: Sequence[Row], opened: Row | None) -> None:
    if not rows:
        st.html(el("div", "No rollouts match.", cls="rl-soft"))
        return
    shown = [list_row(row, opened) for row in rows[:LISTED]]
    high = len(shown) > ROWS
    with st.container(height=HEAD_PX + ROWS * ROW_PX if high else "content", border=False, key="rollouts-frame"):
        table.show("rollouts", COLUMNS, shown, on_open=open_rollout)
    if len(rows) > LISTED:
        st.caption(f"and {fmt.step(len(rows) - LISTED)} more: narrow the filter")


def list_row(row: Row, opened: Row | None) -> table.TableRow:
    """Return a rollout as a row of the table with :data:`COLUMNS`, highlighted if it is ``opened``."""
    parts = " · ".join(f"{fmt.shorten(name, 24)} {fmt.number(given)}" for name, given in reward_parts(row).items())
    flagged = flags_of(row)
    numbers = {name: value(row, name) for name in ("reward", "advantage", "length", "repetition", "kl")}
    cells = {name: table.text("" if number is None else fmt.number(number)) for name, number in numbers.items()}
    return table.TableRow(
        [
            table.text(fmt.step(row["step"])),
            table.text(fmt.shorten(one_line(str(row.get("prompt") or "")), SNIPPET)),
            table.text(snippet(str(row.get("completion") or ""))),
            cells["reward"],
            table.text(parts),
            cells["advantage"],
            table.text("" if numbers["length"] is None else fmt.step(int(numbers["length"]))),
            cells["repetition"],
            cells["kl"],
            table.text("" if row.get("group") is None else fmt.shorten(str(row["group"]), 12)),
            table.text(", ".join(flagged)),
        ],
        opens=row["key"],
        chosen=opened is not None and opened["key"] == row["key"],
    )


def one_line(text: str) -> str:
    """Return ``text`` on one line; of a very long text only its two ends."""
    ends = text if len(text) <= 8 * SNIPPET else f"{text[: 4 * SNIPPET]} … {text[-4 * SNIPPET :]}"
    return " ".join(ends.split())


def snippet(text: str) -> str:
    """Return the beginning and the end of ``text`` on one line; the end usually contains the answer."""
    line = one_line(text)
    whole = line if len(line) <= 2 * SNIPPET else f"{line[:SNIPPET]} … {line[-SNIPPET:]}"
    return fmt.shorten(whole, 2 * SNIPPET + 3)


def open_rollout(key: str) -> None:
    """Show the rollout with the given key in full, by putting it into the page's address."""
    st.query_params["rollout"] = key


def _opened(found: Recorded, chosen: Sequence[Row]) -> Row | None:
    """Return the rollout in the address, even if the filter excludes it; else the first match."""
    key = st.query_params.get("rollout", "")
    named = next((row for row in found.rows if row["key"] == key), None)
    return named or next(iter(chosen), None)


def _show(found: Recorded, row: Row, go_to_tokens: GoToTokens) -> None:
    batches = found.culprits.get((row["attempt"], row["step"]), ())
    title, leave = st.columns([8, 2], vertical_alignment="bottom")
    title.html(el("div", f"Step {fmt.step(row['step'])}", cls="rl-head rl-step"))
    if batches and leave.button("Tokens", key="tokens", icon=":material/text_fields:", width="stretch"):
        go_to_tokens(queries_run(), row["step"])
    if row.get("spike"):
        _show_spike(row)
        return
    everything = [culprit for batch in batches if batch.reason == CULPRITS for culprit in culprits_of(batch)]
    st.html(joined(rollout(row, marks(row, everything))))


def queries_run() -> str:
    """Return the id of the run in the page's address, "" if there is none."""
    return st.query_params.get("run", "")


def _show_spike(row: Row) -> None:
    """Draw the recorded tokens of a response, with its culprits marked."""
    batches: list[Any] = [
        batch for batch in queries.of_step(queries_run(), row["step"]) if batch.attempt == row["attempt"]
    ]
    culprits = tokens_of(batches)
    token = next((one for one in culprits if one.key.rpartition(".")[0] == row["culprit_key"]), None)
    if token is None or response_of(batches, token) is None:
        st.html(joined(rollout(row)))
        return
    st.html(joined(facts(row)))
    if row.get("prompt"):
        st.html(joined(el("div", "Prompt", cls="rl-panel"), text_block(str(row["prompt"]))))
    token_response.show_response(batches, token, culprits)
