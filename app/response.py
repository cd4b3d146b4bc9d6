"""A response as running text on coloured ground: the tokens are data, drawn as text nodes by ``response.js``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import streamlit as st

from .token_rows import Response, Token, tokens
from .token_scale import Level
from .token_stretch import gaps
from .token_text import pieces
from .token_words import exactly, place

HERE = Path(__file__).resolve().parent


def data(
    response: Response, indices: Sequence[int], levels: Sequence[Level], culprits: Mapping[str, str]
) -> dict[str, Any]:
    """What the script gets: the tokens at ``indices`` with their ``levels``, and the gaps between them.

    ``culprits``: key -> cause.
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


def show(
    key: str, what: Mapping[str, Any], colours: tuple[str, str], chosen: str, on_pick: Callable[[str], None]
) -> None:
    """Draw it. ``colours`` of values below and above 0; ``on_pick`` is told the key of a token that was clicked."""
    below, above = colours
    _component()(
        key=key,
        data={**what, "below": below, "above": above, "chosen": chosen},
        on_pick_change=partial(_tell, key, on_pick),
    )


@cache
def _component() -> Callable[..., Any]:
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("response.js", "response.css"))
    mounted: Callable[..., Any] = st.components.v2.component("rlwatch_response", js=script, css=style)
    return mounted


def _tell(key: str, on_pick: Callable[[str], None]) -> None:
    picked = getattr(st.session_state.get(key), "pick", None)
    if picked:
        on_pick(str(picked))
