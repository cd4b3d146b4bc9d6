"""One step of the tokens page: the sentence, the culprits, the layers, the response."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from rlwatch.records import FAR_OUT, NON_FINITE, RunInfo, SpikeBatch

from .. import format as fmt
from .. import queries, table, token_layers, token_tables, token_words
from ..markup import el, joined
from ..token_rows import Token, culprits_of, response_of, tokens
from ..token_steps import Entry
from . import tokens_response

MOST = 100
"""Rows of a table of tokens."""


def show(run: RunInfo, entry: Entry) -> None:
    """Everything about one step."""
    batches = [batch for batch in queries.of_step(run.run_id, entry.step) if batch.attempt == entry.attempt]
    culprits = culprits_of(batches)
    st.html(
        joined(
            el("div", token_words.headline(entry, queries.usual_norm(run)), cls="rl-head rl-step"),
            el("div", " ".join(token_words.finding(entry, culprits)), cls="rl-why"),
        )
    )
    _notes(entry)
    token = _chosen(batches, culprits)
    _table("culprits", culprits, token, token_tables.CULPRITS)
    _layers(entry, token)
    if token is not None:
        tokens_response.show(batches, token, culprits)
    far = _of(batches, NON_FINITE) + _of(batches, FAR_OUT)
    if far:
        st.html(el("div", "Far-out tokens of this step", cls="rl-family"))
        _table("far-out", far, None, token_tables.FAR_OUT)


def _of(batches: Sequence[SpikeBatch], reason: str) -> list[Token]:
    return [token for batch in batches if batch.reason == reason for token in tokens(batch)]


def _chosen(batches: Sequence[SpikeBatch], culprits: Sequence[Token]) -> Token | None:
    """The token of the address, be it a culprit or one beside it; else the worst culprit."""
    key = st.query_params.get("token", "")
    found = next((token for token in culprits if token.key == key), None)
    return found or _beside(batches, key) or next(iter(culprits), None)


def _beside(batches: Sequence[SpikeBatch], key: str) -> Token | None:
    """A token of a recorded response, by its key."""
    parts = key.split(".")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 16 for part in parts):
        return None
    rank, microbatch, sequence, position = map(int, parts)
    response = response_of(batches, Token(rank, microbatch, sequence, position))
    if response is None or position not in response.positions:
        return None
    row = int(response.rows[response.positions.searchsorted(position)])
    return tokens(response.batch, [row])[0]


def _notes(entry: Entry) -> None:
    notes = () if entry.report is None else entry.report.notes
    if notes:
        st.html(el("div", *(el("div", fmt.shorten(note, 300)) for note in notes[:8]), cls="rl-quiet"))


def _layers(entry: Entry, token: Token | None) -> None:
    whole = {} if entry.report is None else entry.report.layers
    own = {} if token is None else token.layers
    colours = token_layers.palette(whole, own)
    bars = [token_layers.bar("Layers: shares of the squared gradient norm of the step", whole, colours)]
    if token is not None:
        bars.append(token_layers.bar(f"and of that of {fmt.shorten(token.label, 24)} alone", own, colours))
    shown = [bar for bar in bars if bar]
    for column, bar in zip(st.columns(max(1, len(shown)), gap="large"), shown, strict=False):
        column.html(el("div", bar))


def _table(key: str, found: Sequence[Token], chosen: Token | None, layout: token_tables.Layout) -> None:
    if not found:
        return
    rows = [layout.row(token, chosen) for token in found[:MOST]]
    table.show(key, layout.columns, rows, on_open=tokens_response.pick if layout.opens else None)
    if len(found) > MOST:
        st.caption(f"and {fmt.step(len(found) - MOST)} more")
