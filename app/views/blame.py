"""On a run's page: which tokens did it, of the newest localised step, with the way to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from rlwatch.records import Event

from .. import format as fmt
from .. import queries, shell, token_words
from ..markup import Markup, el, joined
from ..token_rows import Token, culprits_of
from ..token_steps import Entry, Report

GoToTokens = Callable[[str, int], None]
"""Leaves for the tokens of a run at a step."""

NAMED = 3
"""Culprits named."""

GAP = "\u2003"
"""Between culprits: an em space, for a dot is how a space of a token looks."""


def show(run_id: str, go_to_tokens: GoToTokens) -> None:
    """One line and a button; nothing where no step was localised."""
    with shell.readable("This run"):
        localised = [event for event in queries.localised(run_id) if event.step is not None]
        if not localised:
            return
        line, button = st.columns([8, 1.6], vertical_alignment="center", gap="medium")
        newest = localised[-1]
        batches = queries.of_step(run_id, int(newest.step or 0))
        line.html(joined(_line(newest, culprits_of([b for b in batches if b.attempt == newest.attempt]))))
        if button.button("Tokens", key="tokens", icon=":material/text_fields:", width="stretch"):
            go_to_tokens(run_id, int(newest.step or 0))


def _line(event: Event, culprits: Sequence[Token]) -> Markup:
    """``Tokens that did it  step 4 766  "…∑" share 41 %, ratio 148, layers.27 62 %``; else why nobody is named."""
    label = el("span", "Tokens that did it", cls="label")
    parts: list[str] = [label, el("span", f"step {fmt.step(event.step)}", cls="rl-word")]
    for token in culprits[:NAMED]:
        parts += [GAP, el("span", fmt.shorten(token.label, 24), cls="rl-token"), f" {token_words.in_short(token)}"]
    if len(culprits) > NAMED:
        parts.append(f"{GAP}and {len(culprits) - NAMED} more")
    if not culprits:
        entry = Entry(event.attempt, event.step or 0, Report.of(event.body))
        parts.append(f"{GAP}{token_words.finding(entry, [])[0]}")
    return el("div", joined(*parts), cls="rl-why")
