"""Page with the tokens of a run: localised steps, culprit tokens of a step with their responses, and recurring ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import streamlit as st

from rlwatch.records import CULPRITS, FAR_OUT, JSON, NON_FINITE, RunInfo, RunState, SpikeBatch

from . import format as fmt
from . import layout, queries, table, token_response, token_scale, token_steps
from .layout import GoToRollouts, GoToRun
from .markup import el, joined
from .queries import MOST_BATCHES
from .token_spread import show_spreads
from .token_steps import LOOKS, LocalisationReport, TokenStep, exact, look, number_of, place, share_words_of, top_layer
from .tokens import LABELS, Token, culprits_of, response_of, tokens

LOGPS = ("logp", "old_logp", "rollout_logp", "ref_logp")


@dataclass(frozen=True, slots=True)
class TokenTableLayout:
    """Layout of a table of tokens with columns ``numbers``. ``with_cause``: also cause and layer; ``opens``: rows are
    links.
    """

    numbers: Sequence[str]
    with_cause: bool = False
    opens: bool = False

    @property
    def columns(self) -> list[table.TableColumn]:
        """Columns of a table with this layout."""
        causes = [table.TableColumn("cause", "tight")] if self.with_cause else []
        layer = [table.TableColumn("top layer", "tight wide")] if self.with_cause else []
        numbers = [table.TableColumn(LABELS.get(name, name), "right tight") for name in self.numbers]
        return [
            table.TableColumn("token", "long"),
            table.TableColumn("where", "tight wide roomy"),
            *causes,
            *numbers,
            *layer,
        ]

    def row(self, token: Token, chosen: Token | None = None) -> table.TableRow:
        """Return a token as a row of the table; it is highlighted if it is ``chosen``."""
        appearance, cause = look(token.words.get("cause", "")), token.words.get("cause", "")
        causes = [table.mark(appearance.shape, appearance.colour, fmt.shorten(cause, 40))] if self.with_cause else []
        layer = [table.text(top_layer(token), quiet=True)] if self.with_cause else []
        numbers = [_number(token, name) for name in self.numbers]
        return table.TableRow(
            [_name(token), table.text(place(token), quiet=True), *causes, *numbers, *layer],
            opens=token.key if self.opens else "",
            chosen=self.opens and chosen is not None and chosen.key == token.key,
        )


def _name(token: Token) -> table.Cell:
    known = token.text is not None and token.token_id is not None
    return table.text(token.label, f"id {token.token_id}" if known else "")


def _number(token: Token, name: str) -> table.Cell:
    """Return a cell with three digits, six in the tooltip; a dash if it was not measured."""
    value = token.numbers.get(name)
    written = share_words_of(value) if name == "share" and value is not None else fmt.number(value)
    return table.text(written, quiet=value is None, title="" if value is None else exact(value))


CULPRITS_LAYOUT = TokenTableLayout(
    ("share", "own_norm", "ratio", "advantage", "entropy", *LOGPS), with_cause=True, opens=True
)
FAR_OUT_LAYOUT = TokenTableLayout(("screen", "ratio", "advantage", "entropy", *LOGPS))


# Recurring culprits (pure).

RECURRING_COLUMNS = (
    table.TableColumn("token", "long"),
    table.TableColumn("times", "right tight"),
    table.TableColumn("steps", "right tight"),
    table.TableColumn("causes", "long"),
    table.TableColumn("first step", "right tight"),
    table.TableColumn("last step", "right tight"),
    table.TableColumn("largest share", "right tight"),
)
MOST_RECURRING = 20
"""Most recurring tokens in the list."""


@dataclass(slots=True)
class RecurringToken:
    """One vocabulary entry that was a culprit token, with counts, steps and causes. ``token``: its
    newest occurrence.
    """

    token: Token
    times: int = 0
    steps: set[int] = field(default_factory=set)
    causes: Counter[str] = field(default_factory=Counter)
    share: float | None = None

    def add(self, token: Token, step: int) -> None:
        """Count an occurrence of the token at a step."""
        self.token, self.times = token, self.times + 1
        self.steps.add(step)
        self.causes[token.words.get("cause") or "unexplained"] += 1
        share = token.numbers.get("share", math.nan)
        if math.isfinite(share):
            self.share = share if self.share is None else max(self.share, share)


def recurring(batches: Iterable[SpikeBatch]) -> list[RecurringToken]:
    """Return tokens that were culprits more than once, the most frequent first.

    ``batches``: batches of culprit tokens, oldest first.
    """
    found: dict[object, RecurringToken] = {}
    for batch in batches:
        for token in tokens(batch):
            key = token.text if token.token_id is None else token.token_id
            if key is not None:
                found.setdefault(key, RecurringToken(token)).add(token, batch.step)
    again = [one for one in found.values() if one.times > 1]
    return sorted(again, key=lambda one: (-one.times, -(one.share or 0.0), one.token.label))


def recurring_row(one: RecurringToken) -> table.TableRow:
    """Return ``one``, a token that was a culprit of several gradient spikes, as a table row with counts, steps, causes
    and largest share.
    """
    token = one.token
    known = token.token_id is not None and token.text is not None
    causes = " · ".join(f"{fmt.shorten(cause, 40)} {count}" for cause, count in one.causes.most_common())
    return table.TableRow(
        [
            table.text(token.label, f"id {token.token_id}" if known else ""),
            table.text(fmt.step(one.times)),
            table.text(fmt.step(len(one.steps))),
            table.text(causes),
            table.text(fmt.step(min(one.steps))),
            table.text(fmt.step(max(one.steps))),
            table.text(fmt.percent(one.share)),
        ]
    )


def recurring_scope(batches: Sequence[SpikeBatch], most: int) -> str:
    """Return the number of localised steps that were searched, in words; ``most``: most batches that are read."""
    steps = {(batch.attempt, batch.step) for batch in batches}
    older = ", the newest" if len(batches) >= most else ""
    return f"over {fmt.plural(len(steps), 'localised step')}{older}"


# One step: the sentence, the culprits, the layers, the response.

MOST_TOKENS = 100
"""Most rows of a table of tokens."""


def show_step(run: RunInfo, entry: TokenStep) -> None:
    """Draw all token records of one step of a run: summary, culprit tokens, the chosen token's
    response, and outliers.
    """
    batches = [batch for batch in queries.of_step(run.run_id, entry.step) if batch.attempt == entry.attempt]
    culprits = culprits_of(batches)
    st.html(
        joined(
            el("div", token_steps.headline(entry, queries.usual_norm(run)), cls="rl-head rl-step"),
            el("div", " ".join(token_steps.finding(entry, culprits)), cls="rl-why"),
        )
    )
    _notes(entry)
    show_rollup(entry.report)
    token = _chosen(batches, culprits)
    _table("culprits", culprits, token, CULPRITS_LAYOUT)
    _layers(entry, token)
    if token is not None:
        token_response.show_response(batches, token, culprits)
    far = _of(batches, NON_FINITE) + _of(batches, FAR_OUT)
    if far:
        st.html(el("div", "Outlier tokens of this step", cls="rl-family"))
        _table("far-out", far, None, FAR_OUT_LAYOUT)


def _of(batches: Sequence[SpikeBatch], reason: str) -> list[Token]:
    return [token for batch in batches if batch.reason == reason for token in tokens(batch)]


def _chosen(batches: Sequence[SpikeBatch], culprits: Sequence[Token]) -> Token | None:
    """Return the token in the address, a culprit or another token of its response; else the worst culprit."""
    key = st.query_params.get("token", "")
    found = next((token for token in culprits if token.key == key), None)
    return found or _beside(batches, key) or next(iter(culprits), None)


def _beside(batches: Sequence[SpikeBatch], key: str) -> Token | None:
    """Return a token of a recorded response, by its key."""
    parts = key.split(".")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        return None
    rank, microbatch, sequence, position = map(int, parts)
    response = response_of(batches, Token(rank, microbatch, sequence, position))
    if response is None or position not in response.positions:
        return None
    row = int(response.rows[response.positions.searchsorted(position)])
    return tokens(response.batch, [row])[0]


def _notes(entry: TokenStep) -> None:
    notes = () if entry.report is None else entry.report.notes
    if notes:
        st.html(el("div", *(el("div", f"Note: {fmt.shorten(note, 300)}") for note in notes[:8]), cls="rl-quiet"))


def _layers(entry: TokenStep, token: Token | None) -> None:
    whole = {} if entry.report is None else entry.report.layers
    own = {} if token is None else token.layers
    colours = token_scale.palette(whole, own)
    bars = [token_scale.bar("Layers: shares of the squared gradient norm of the step", whole, colours)]
    if token is not None:
        bars.append(token_scale.bar(f"Layers: shares for “{fmt.shorten(token.label, 24)}” alone", own, colours))
    shown = [bar for bar in bars if bar]
    for column, bar in zip(st.columns(max(1, len(shown)), gap="large"), shown, strict=False):
        column.html(el("div", bar))


def _table(key: str, found: Sequence[Token], chosen: Token | None, layout: TokenTableLayout) -> None:
    if not found:
        return
    rows = [layout.row(token, chosen) for token in found[:MOST_TOKENS]]
    table.show(key, layout.columns, rows, on_open=token_response.pick if layout.opens else None)
    if len(found) > MOST_TOKENS:
        st.caption(f"and {fmt.step(len(found) - MOST_TOKENS)} more")


# Tokens of one run: localised steps, culprits, and their responses.

ROWS, ROW_PX, HEAD_PX = 8, 37, 40
"""Steps visible without scrolling, and heights of a row and of the header in pixels."""

LISTED = 200
"""Most steps in the list."""

NOTHING = (
    "No token data yet. rlwatch records tokens when the gradient spikes or is not finite "
    "and when a token is an outlier."
)


def page(go_to_run: GoToRun, go_to_rollouts: GoToRollouts) -> None:
    """Draw the page of the run, step and token in the browser's address.

    ``go_to_run``, ``go_to_rollouts``: open the page of a run, or of its rollouts.
    """
    run_id = st.query_params.get("run", "")
    if not run_id:
        st.info("No run selected. Open a run, then its tokens.")
        return
    with layout.readable("This run"):
        run = queries.run(run_id)
        wanted = st.session_state.get("live", st.query_params.get("live") != "false")
        live = run.state is RunState.RUNNING and wanted
        _head(run, go_to_run, go_to_rollouts)
        st.fragment(_body, run_every=layout.REFRESH_S if live else None)(run_id)


def _head(run: RunInfo, go_to_run: GoToRun, go_to_rollouts: GoToRollouts) -> None:
    head = layout.run_head(run, "tokens")
    if head.button("Rollouts", key="rollouts", icon=":material/article:", help="Completions of this step"):
        go_to_rollouts(run.run_id, token_steps.numbered(st.query_params.get("step")))
    if head.button("Run", key="back", icon=":material/arrow_back:", help="Run page"):
        go_to_run(run.run_id)


def _body(run_id: str) -> None:
    with layout.readable("This run"):
        run, culprits = queries.run(run_id), queries.culprits(run_id)
        entries = token_steps.entries(queries.localised(run_id), culprits, queries.far_out(run_id))
        if not entries and "step" not in st.query_params:
            st.caption(NOTHING)
            show_spreads(run)
            return
        shown = _shown(run_id, entries)
        if shown is None:
            return
        _stay(shown)
        _steps(entries, shown)
        show_step(run, shown)
        _recurring(culprits)
        show_spreads(run)


def _shown(run_id: str, entries: Sequence[TokenStep]) -> TokenStep | None:
    """Return the step in the address, even if too old for the list, else the newest; None if there are no steps."""
    step, attempt = st.query_params.get("step"), st.query_params.get("attempt")
    found, number = token_steps.chosen(entries, step, attempt), token_steps.numbered(step)
    if found is not None or number is None:
        return found
    batches = queries.of_step(run_id, number)
    older = token_steps.entries(
        [], [b for b in batches if b.reason == CULPRITS], [b for b in batches if b.reason in {FAR_OUT, NON_FINITE}]
    )
    return token_steps.chosen(older, step, attempt) or TokenStep(0, number)


def _stay(shown: TokenStep) -> None:
    """Put the step into the address, so that a newer one does not replace it while the user reads."""
    if "step" not in st.query_params:
        st.query_params["step"] = str(shown.step)


def _steps(entries: Sequence[TokenStep], shown: TokenStep) -> None:
    count = sum(entry.report is not None for entry in entries)
    st.html(el("div", _count_words(count, len(entries) - count), cls="rl-family"))
    found = token_steps.matching(entries, _causes()) if len(entries) > 1 else list(entries)
    if not found:
        st.caption("No steps match this filter.")
        return
    attempts = len({entry.attempt for entry in entries})
    rows = [token_steps.step_row(entry, shown, attempts) for entry in found[:LISTED]]
    high = len(rows) > ROWS
    with st.container(height=HEAD_PX + ROWS * ROW_PX if high else "content", border=False, key="steps-frame"):
        table.show("token-steps", token_steps.STEP_COLUMNS, rows, on_open=open_step)
    if len(found) > LISTED:
        st.caption(f"and {fmt.step(len(found) - LISTED)} older")


def _count_words(localised: int, others: int) -> str:
    known = [
        fmt.plural(localised, "localised step") if localised else "",
        fmt.plural(others, "step") + " with outlier tokens only" if others else "",
    ]
    return ", ".join(filter(None, known)) or "No token data"


def _causes() -> list[str]:
    chosen = st.multiselect(
        "Cause",
        list(LOOKS),
        key="cause",
        placeholder="all causes",
        label_visibility="collapsed",
        bind="query-params",
        width=420,
    )
    return list(chosen)


def open_step(key: str) -> None:
    """Show the step with the given :attr:`TokenStep.key`, and clear the token chosen before."""
    attempt, _, step = key.partition(".")
    st.query_params["step"], st.query_params["attempt"] = step, attempt
    st.query_params.pop("token", None)


def _recurring(culprits: Sequence[SpikeBatch]) -> None:
    if not culprits:
        return
    st.html(el("div", "Recurring culprit tokens", cls="rl-family"))
    again = recurring(culprits)
    if not again:
        st.caption(f"No recurring culprits {recurring_scope(culprits, MOST_BATCHES)}.")
        return
    rows = [recurring_row(one) for one in again[:MOST_RECURRING]]
    table.show("recurring", RECURRING_COLUMNS, rows)
    more = f"; and {fmt.step(len(again) - len(rows))} more tokens" if len(again) > len(rows) else ""
    st.caption(f"{recurring_scope(culprits, MOST_BATCHES).capitalize()}{more}")


# Tables of a localised step: the shares of its units, and the effect of possible cures.

UNIT_COLUMNS = (
    table.TableColumn("contribution", "long"),
    table.TableColumn("share of the norm", "right tight"),
    table.TableColumn("along the gradient", "right tight middling"),
    table.TableColumn("against the gradient", "right tight middling"),
    table.TableColumn("tokens", "right tight"),
)
CURE_COLUMNS = (
    table.TableColumn("intervention", "long"),
    table.TableColumn("norm", "right tight"),
    table.TableColumn("resulting norm", "right tight"),
    table.TableColumn("times", "right tight middling"),
)


def show_rollup(report: LocalisationReport | None) -> None:
    """Draw the tables of a localised step: contributions to the gradient, and gradient norms recomputed with changes of
    the loss, as far as known.
    """
    if report is None:
        return
    units = [unit_row(unit) for unit in report.units]
    cures = [cure_row(cure) for cure in report.cures]
    if units:
        table.show("units", UNIT_COLUMNS, units)
        st.html(el("div", rollup_words(report), cls="rl-soft"))
    if cures:
        table.show("cures", CURE_COLUMNS, cures)
        st.html(el("div", "Recomputed with the changed coefficients, not estimated.", cls="rl-soft"))


def rollup_words(report: LocalisationReport) -> str:
    """Return sentences on the sum of the shares, and on the part of the excess that the listed tokens hold."""
    words = ["Shares of the gradient norm; they add up to 100 % minus the gap. Negative shares cancel."]
    if report.count:
        known = report.explained
        held = "" if known is None else f"; those listed hold {fmt.percent(known)} of their excess"
        words.append(f"{fmt.plural(report.count, 'token')} stand out{held}.")
    return " ".join(words)


def unit_row(unit: Mapping[str, JSON]) -> table.TableRow:
    """Return the contribution of a unit (a token, response or other part) as a table row."""
    level, name = str(unit.get("level") or ""), str(unit.get("name") or "")
    tokens = number_of(unit.get("tokens"))
    known = [number_of(unit.get(part)) for part in ("share", "up", "down")]
    return table.TableRow(
        [
            table.text(fmt.shorten(name, 80), fmt.shorten(level, 20) if level not in name else ""),
            *(table.text("" if part is None else fmt.percent(part)) for part in known),
            table.text(fmt.step(int(tokens)) if tokens is not None and math.isfinite(tokens) else ""),
        ]
    )


def cure_row(cure: Mapping[str, JSON]) -> table.TableRow:
    """Return ``cure``, a change of the loss that was computed for a step, as a table row with the gradient norm before
    and after it.
    """
    before, after = number_of(cure.get("before")), number_of(cure.get("after"))
    times = after / before if before and after is not None else None
    shown: Sequence[float | None] = (before, after, times)
    return table.TableRow(
        [
            table.text(fmt.shorten(str(cure.get("action") or cure.get("kind") or ""), 160)),
            *(table.text("" if number is None else fmt.number(number)) for number in shown),
        ]
    )
