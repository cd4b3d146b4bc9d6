"""The chosen token in full, and its response as running text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import streamlit as st

from rlwatch.records import SpikeBatch

from .. import format as fmt
from .. import response, shell, token_scale, token_words
from ..markup import Markup, el, joined
from ..token_legend import legend
from ..token_looks import look
from ..token_rows import Response, Token, response_of
from ..token_scale import Level, Quantity
from ..token_stretch import drawn
from ..token_text import inert

OPT_IN = "Only token ids were recorded. To record text as well, watch with text=True: watch(trainer, text=True)."
NO_RESPONSE = "The response around this token was not recorded."
AROUND = 80
"""Characters of the text before and after a culprit."""


def pick(key: str) -> None:
    """Choose a token: the address keeps it."""
    st.query_params["token"] = key


def show(batches: Sequence[SpikeBatch], token: Token, culprits: Sequence[Token]) -> None:
    """What is known of ``token``, then its response."""
    st.html(joined(_facts(token)))
    found = response_of(batches, token)
    if found is None:
        st.html(joined(_context(token), el("div", NO_RESPONSE, cls="rl-quiet")))
        return
    quantity = _quantity(found)
    here = [one.position for one in culprits if _same_response(one, token)]
    indices = drawn(found.positions, [token.position, *here])
    end, levels = _levels(quantity, found, indices)
    signed = quantity is None or quantity.signed
    colours = (shell.ink().line, token_scale.ORANGE if signed else token_scale.GREEN)
    st.html(joined(legend(quantity, end, colours, levels)))
    causes = {one.key: one.words.get("cause", "") for one in culprits}
    response.show("response", response.data(found, indices.tolist(), levels, causes), colours, token.key, pick)
    st.caption(_coverage(found, len(indices), token))


def _levels(quantity: Quantity | None, found: Response, indices: np.ndarray) -> tuple[float, list[Level]]:
    """Where the scale of the whole response ends, and the places on it of the tokens drawn."""
    values = None if quantity is None else token_scale.values(quantity.name, found)
    if quantity is None or values is None:
        return 0.0, [None] * len(indices)
    end = token_scale.limit(values)
    return end, token_scale.levels(values[indices], end, quantity)


def _same_response(one: Token, other: Token) -> bool:
    return (one.rank, one.microbatch, one.sequence) == (other.rank, other.microbatch, other.sequence)


def _facts(token: Token) -> Markup:
    """The token, where it is, why it is blamed, and its numbers, exactly."""
    cause, why = token.words.get("cause", ""), token.words.get("why", "")
    appearance = look(cause)
    blamed = el("span", el("span", appearance.shape, style=f"color:{appearance.colour}"), f" {cause}", cls="rl-word")
    name = f"id {token.token_id}" if token.text is not None and token.token_id is not None else ""
    parts = [el("span", text) for text in (token_words.place(token), name) if text]
    told = el("div", fmt.shorten(why, 300), cls="rl-why") if why else Markup()
    numbers = [el("span", el("span", f"{label} ", cls="label"), value) for label, value in token_words.exactly(token)]
    return joined(
        el("div", el("span", token.label, cls="rl-token"), *([blamed] if cause else []), *parts, cls="rl-facts"),
        told,
        el("div", *numbers, cls="rl-facts"),
    )


def _context(token: Token) -> Markup:
    """The text around a culprit whose response was not recorded."""
    before, after = token.words.get("before", ""), token.words.get("after", "")
    if not before and not after:
        return Markup()
    around = [inert(before[-AROUND:], AROUND), el("span", token.label, cls="rl-token"), inert(after, AROUND)]
    return el("div", *around, cls="rl-context")


def _quantity(found: Response) -> Quantity | None:
    """What colours the text, by choice of those that were measured; None where none was."""
    names = token_scale.measured(found)
    if not names:
        return None
    chosen = st.segmented_control(
        "Colour by", names, default=names[0], required=True, key="by", bind="query-params", label_visibility="collapsed"
    )
    return token_scale.BY_NAME[str(chosen or names[0])]


def _coverage(found: Response, count: int, token: Token) -> str:
    """How much of the response is drawn, and how to see text where only ids are known."""
    everything = len(found.rows)
    part = f"{fmt.step(count)} of {fmt.step(everything)}" if count < everything else fmt.step(everything)
    kept = ", around the chosen token and the culprits" if count < everything else ""
    words = f"Sequence {token.sequence}: {part} recorded tokens drawn{kept}."
    return f"{words} {OPT_IN}" if token.text is None else words
