"""The frame of every page: who looks, the theme, the store's name, and a plain message where it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote

import streamlit as st

from rlwatch.errors import RLWatchError, RunNotFoundError

from . import format as fmt
from .charts import DARK, LIGHT, Ink
from .markup import Markup, el, joined
from .principal import NAME_HEADER, ROLE_HEADER, Principal
from .queries import store_url

REFRESH_S = 5.0
"""Seconds between two looks of a live page that is told nothing; behind the gate it is (``news.py``)."""


GoToTokens = Callable[[str, int], None]
"""Leave for the tokens of a run at a step."""

GoToRollouts = Callable[[str, int | None], None]
"""Leave for the rollouts of a run, of one step or (None) of all."""

GoToCompare = Callable[[Sequence[str]], None]
"""Leave for the runs of these ids beside each other."""

GoToRun = Callable[[str], None]
"""Leave for the page of the run of this id."""


def ink() -> Ink:
    """Chart colours for the theme the browser shows."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def principal() -> Principal:
    """Name and role of whoever looks at this page, as the gate says; a nobody where there is no gate."""
    headers = st.context.headers
    return Principal(unquote(headers.get(NAME_HEADER, "")), headers.get(ROLE_HEADER, ""))


LOOK_ONLY = "Read-only access: open the operator link of rlwatch ui to send commands"
"""Hint at a button that a viewer cannot press."""


def account_line() -> None:
    """Draw name, role and the way out at the upper right of every page."""
    who = principal()
    if who.name:
        leave = Markup('<a href="logout" target="_self">log out</a>')
        st.html(
            el("div", el("span", fmt.shorten(who.name, 40), title=who.name), f" · {who.role} · ", leave, cls="rl-who")
        )


def signature() -> None:
    """Draw the name that a command will be kept with: ``Signed in as ann (operator)``."""
    who = principal()
    name = el("b", who.name or "anonymous")
    st.html(el("div", "Signed in as ", name, f" ({who.role or 'not logged in'})", cls="rl-quiet"))


def store_line(*facts: str) -> None:
    """Draw the store's address, small, at the right."""
    st.html(el("div", joined("  ·  ".join((*facts, f"store {fmt.shorten(store_url(), 160)}"))), cls="rl-store"))


@contextmanager
def readable(what: str = "The store") -> Iterator[None]:
    """Say what could not be read, in words, instead of a traceback."""
    try:
        yield
    except RunNotFoundError as error:
        st.warning("Run not found in this store.", icon=":material/search_off:")
        st.code(str(error), language=None, wrap_lines=True)
    except RLWatchError as error:
        st.error(f"{what} cannot be read. This page retries automatically.", icon=":material/error:")
        st.code(str(error), language=None, wrap_lines=True)
