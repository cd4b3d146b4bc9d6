"""On every page: the theme, the store's name, and a plain message where it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from rlwatch.errors import RLWatchError, RunNotFoundError

from . import format as fmt
from .charts import DARK, LIGHT, Ink
from .markup import el, joined
from .queries import store_url

REFRESH_S = 5.0
"""How often a live page looks again, in seconds."""


def ink() -> Ink:
    """Chart colours for the theme the browser shows."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def store_line(*facts: str) -> None:
    """Which store this is, small, at the right."""
    st.html(el("div", joined("  ·  ".join((*facts, f"store {fmt.shorten(store_url(), 160)}"))), cls="rl-store"))


@contextmanager
def readable(what: str = "The store") -> Iterator[None]:
    """Say what could not be read, in words, instead of a traceback."""
    try:
        yield
    except RunNotFoundError as error:
        st.warning("There is no such run in this store.", icon=":material/search_off:")
        st.code(str(error), language=None, wrap_lines=True)
    except RLWatchError as error:
        st.error(f"{what} cannot be read. This page tries again by itself.", icon=":material/error:")
        st.code(str(error), language=None, wrap_lines=True)
