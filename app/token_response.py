"""The chosen token in full, and its response as running text with coloured background.

The tokens are data, drawn as text nodes by ``response.js``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st

from rlwatch.records import SpikeBatch

from . import format as fmt
from . import layout, token_scale, token_steps
from .markup import Markup, el, joined
from .token_scale import Level, TokenMeasure, legend
from .token_steps import exactly, look, place
from .tokens import Response, Token, inert, pieces, response_of, tokens

MOST_DRAWN = 2000
"""Most tokens drawn, so that a browser lays them out quickly."""


def drawn(positions: np.ndarray, anchors: Sequence[int], most: int = MOST_DRAWN) -> np.ndarray:
    """Return at most ``most`` indices into ``positions`` (N,), in order, with the widest range around each anchor.

    ``anchors`` are positions, the most important first; if there are more than ``most``, the first ones are drawn.
    Without anchors the beginning is drawn.
    """
    count = len(positions)
    if count <= most:
        return np.arange(count)
    places = [int(i) for i in np.searchsorted(positions, list(dict.fromkeys(anchors))[:most]) if i < count] or [0]
    low, high = 0, count
    while low < high:  # the widest range that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _covered(count, places, middle).sum() <= most else (low, middle - 1)
    return np.flatnonzero(_covered(count, places, low))


def _covered(count: int, places: Sequence[int], width: int) -> np.ndarray:
    """Return a mask (count,) of indices within ``width`` of one of ``places``."""
    ends = np.zeros(count + 1, dtype=np.int64)
    np.add.at(ends, np.maximum(np.asarray(places) - width, 0), 1)
    np.add.at(ends, np.minimum(np.asarray(places) + width + 1, count), -1)
    return np.asarray(np.cumsum(ends[:-1]) > 0)


def gaps(indices: Sequence[int] | np.ndarray, positions: np.ndarray) -> list[tuple[int, int]]:
    """Return the gap before each drawn token and after the last: (recorded tokens left out, unrecorded tokens).

    ``indices``: drawn tokens as indices into ``positions``. Tokens after the last recorded one are unknown and not
    counted.
    """
    ends = np.concatenate(([-1], indices, [len(positions)]))
    left_out = np.diff(ends) - 1
    at = np.concatenate(([-1], positions[indices], positions[-1:] + 1))
    unrecorded = np.diff(at) - 1 - left_out
    return list(zip(left_out.tolist(), np.maximum(unrecorded, 0).tolist(), strict=True))


# A response as running text with coloured background; ``response.js`` draws the tokens as text nodes.

HERE = Path(__file__).resolve().parent


def response_data(
    response: Response, indices: Sequence[int], levels: Sequence[Level], culprits: Mapping[str, str]
) -> dict[str, Any]:
    """Return the data of a response for ``response.js``: the tokens at ``indices`` with their levels, and gaps between
    them.

    ``levels``: colours of these tokens; ``culprits``: cause of each culprit token by the token's key.
    """
    shown = tokens(response.batch, [int(response.rows[i]) for i in indices])
    names = [name for name, _ in exactly(shown[0])] if shown else []
    rows = [_token(token, level, culprits) for token, level in zip(shown, levels, strict=True)]
    body = {"names": names, "tokens": rows, "gaps": gaps(indices, response.positions), "ids": _ids(shown)}
    return {**body, "version": hashlib.blake2b(json.dumps(body).encode(), digest_size=8).hexdigest()}


def _token(token: Token, level: Level, culprits: Mapping[str, str]) -> dict[str, Any]:
    text = [(str(token.token_id), False)] if token.text is None else pieces(token.text)
    return {
        "key": token.key,
        "text": text or [("∅", True)],
        "level": level,
        "culprit": token.key in culprits,
        "title": _title(token, culprits),
        "values": [value for _, value in exactly(token)],
    }


def _title(token: Token, culprits: Mapping[str, str]) -> str:
    cause = culprits.get(token.key)
    named = "" if token.token_id is None else f" · id {token.token_id}"
    return f"{place(token)}{named}{f' · culprit: {cause}' if cause else ''}"


def _ids(shown: Sequence[Token]) -> bool:
    return bool(shown) and shown[0].text is None


def draw_response(
    key: str, what: Mapping[str, Any], colours: tuple[str, str], chosen: str, on_pick: Callable[[str], None]
) -> None:
    """Draw the tokens of a response with coloured background.

    Parameters
    ----------
    key
        Widget key.
    what
        Data from :func:`response_data`.
    colours
        Colours of values below and above 0.
    chosen
        Key of the highlighted token.
    on_pick
        Receives the key of a clicked token.
    """
    below, above = colours
    _component()(
        key=key,
        data={**what, "below": below, "above": above, "chosen": chosen},
        on_pick_change=partial(_notify_pick, key, on_pick),
    )


@cache
def _component() -> Callable[..., Any]:
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("response.js", "response.css"))
    mounted: Callable[..., Any] = st.components.v2.component("rlwatch_response", js=script, css=style)
    return mounted


def _notify_pick(key: str, on_pick: Callable[[str], None]) -> None:
    picked = getattr(st.session_state.get(key), "pick", None)
    if picked:
        on_pick(str(picked))


# The chosen token in full, and its response as running text.

OPT_IN = "Only token ids were recorded. To record text as well, watch with text=True: watch(trainer, text=True)."
NO_RESPONSE = "The response around this token was not recorded."
AROUND = 80
"""Characters of context before and after a culprit token."""


def pick(key: str) -> None:
    """Choose the token with the given key, by putting it into the page's address."""
    st.query_params["token"] = key


def show_response(batches: Sequence[SpikeBatch], token: Token, culprits: Sequence[Token]) -> None:
    """Draw all recorded facts of ``token``, then the response that contains it, with its culprit tokens marked.

    ``batches``: token records of the step.
    """
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
    colours = (layout.ink().line, token_scale.ORANGE if signed else token_scale.GREEN)
    st.html(joined(legend(quantity, end, colours, levels)))
    causes = {one.key: one.words.get("cause", "") for one in culprits}
    draw_response("response", response_data(found, indices.tolist(), levels, causes), colours, token.key, pick)
    st.caption(_coverage(found, len(indices), token))


def _levels(quantity: TokenMeasure | None, found: Response, indices: np.ndarray) -> tuple[float, list[Level]]:
    """Return the end of the response's scale, and the levels of the drawn tokens on it."""
    values = None if quantity is None else token_scale.values(quantity.name, found)
    if quantity is None or values is None:
        return 0.0, [None] * len(indices)
    end = token_scale.scale_end(values)
    return end, token_scale.levels(values[indices], end, quantity)


def _same_response(one: Token, other: Token) -> bool:
    return (one.rank, one.microbatch, one.sequence) == (other.rank, other.microbatch, other.sequence)


def _facts(token: Token) -> Markup:
    """Return the token, its position, its cause, and its exact numbers."""
    cause, why = token.words.get("cause", ""), token.words.get("why", "")
    appearance = look(cause)
    named = el("span", el("span", appearance.shape, style=f"color:{appearance.colour}"), f" {cause}", cls="rl-word")
    name = f"id {token.token_id}" if token.text is not None and token.token_id is not None else ""
    parts = [el("span", text) for text in (token_steps.place(token), name) if text]
    reason = el("div", fmt.shorten(why, 300), cls="rl-why") if why else Markup()
    numbers = [el("span", el("span", f"{label} ", cls="label"), value) for label, value in token_steps.exactly(token)]
    return joined(
        el("div", el("span", token.label, cls="rl-token"), *([named] if cause else []), *parts, cls="rl-facts"),
        reason,
        el("div", *numbers, cls="rl-facts"),
    )


def _context(token: Token) -> Markup:
    """Return the text around a culprit whose response was not recorded."""
    before, after = token.words.get("before", ""), token.words.get("after", "")
    if not before and not after:
        return Markup()
    around = [inert(before[-AROUND:], AROUND), el("span", token.label, cls="rl-token"), inert(after, AROUND)]
    return el("div", *around, cls="rl-context")


def _quantity(found: Response) -> TokenMeasure | None:
    """Return the chosen quantity for the text's colours, or None if none was measured."""
    names = token_scale.measured(found)
    if not names:
        return None
    chosen = st.segmented_control(
        "Colour by", names, default=names[0], required=True, key="by", bind="query-params", label_visibility="collapsed"
    )
    return token_scale.BY_NAME[str(chosen or names[0])]


def _coverage(found: Response, count: int, token: Token) -> str:
    """Describe the drawn part of the response, and how to record text if only ids are known."""
    everything = len(found.rows)
    part = f"{fmt.step(count)} of {fmt.step(everything)}" if count < everything else fmt.step(everything)
    kept = ", around the chosen token and the culprits" if count < everything else ""
    words = f"Sequence {token.sequence}: {part} recorded tokens drawn{kept}."
    return f"{words} {OPT_IN}" if token.text is None else words
