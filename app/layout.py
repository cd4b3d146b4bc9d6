"""Common parts of all pages: the user, the theme, the store's address, and an error message if it cannot be read."""

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
"""Seconds between two refreshes of a live page; behind the gate, changes also trigger one (``news.py``)."""


GoToTokens = Callable[[str, int], None]
"""Open the tokens of a run at a step."""

GoToRollouts = Callable[[str, int | None], None]
"""Open the rollouts of a run, of one step or (None) of all."""

GoToCompare = Callable[[Sequence[str]], None]
"""Open the comparison of the runs of these ids."""

GoToRun = Callable[[str], None]
"""Open the page of the run of this id."""


def ink() -> Ink:
    """Return the chart colours for the browser's theme."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def principal() -> Principal:
    """Return the user's name and role from the gate's headers; both are empty without a gate."""
    headers = st.context.headers
    return Principal(unquote(headers.get(NAME_HEADER, "")), headers.get(ROLE_HEADER, ""))


LOOK_ONLY = "Read-only access: open the operator link of rlwatch ui to send commands"
"""Tooltip of a button that is disabled for viewers."""


def account_line() -> None:
    """Draw name, role and the logout link at the upper right of every page."""
    who = principal()
    if who.name:
        leave = Markup('<a href="logout" target="_self">log out</a>')
        st.html(
            el("div", el("span", fmt.shorten(who.name, 40), title=who.name), f" · {who.role} · ", leave, cls="rl-who")
        )


def signature() -> None:
    """Draw the name that is recorded with a command: ``Signed in as ann (operator)``."""
    who = principal()
    name = el("b", who.name or "anonymous")
    st.html(el("div", "Signed in as ", name, f" ({who.role or 'not logged in'})", cls="rl-quiet"))


def store_line(*facts: str) -> None:
    """Draw the store's address, small, at the right."""
    st.html(el("div", joined("  ·  ".join((*facts, f"store {fmt.shorten(store_url(), 160)}"))), cls="rl-store"))


@contextmanager
def readable(what: str = "The store") -> Iterator[None]:
    """Show a message instead of a traceback if ``what`` cannot be read."""
    try:
        yield
    except RunNotFoundError as error:
        st.warning("Run not found in this store.", icon=":material/search_off:")
        st.code(str(error), language=None, wrap_lines=True)
    except RLWatchError as error:
        st.error(f"{what} cannot be read. This page retries automatically.", icon=":material/error:")
        st.code(str(error), language=None, wrap_lines=True)
