"""Common parts of all pages: user, theme, address of the store, and an error message if the store cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import streamlit as st

from rlwatch.errors import RLWatchError, RunNotFoundError
from rlwatch.records import RunInfo, RunState

from . import format as fmt
from .charts import DARK, LIGHT, Ink
from .markup import Markup, el, joined
from .principal import NAME_HEADER, ROLE_HEADER, Principal
from .queries import store_url

if TYPE_CHECKING:
    from streamlit.delta_generator import DeltaGenerator

REFRESH_S = 5.0
"""Seconds between two refreshes of a live page; behind the gate, changes also trigger one (``news.py``)."""


GoToTokens = Callable[[str, int], None]
"""Function that opens the tokens of a run at a step."""

GoToRollouts = Callable[[str, int | None], None]
"""Function that opens the rollouts of a run, of one step or (None) of all."""

GoToCompare = Callable[[Sequence[str]], None]
"""Function that opens the comparison of the runs with the given ids."""

GoToRun = Callable[[str], None]
"""Function that opens the page of the run with the given id."""


def ink() -> Ink:
    """Return the chart colours for the browser's light or dark theme."""
    return DARK if st.context.theme.type == "dark" else LIGHT


def principal() -> Principal:
    """Return the user's name and role from the gate's headers; both are empty without a gate."""
    headers = st.context.headers
    return Principal(unquote(headers.get(NAME_HEADER, "")), headers.get(ROLE_HEADER, ""))


LOOK_ONLY = "Read-only access: open the operator link of rlwatch ui to send commands"
"""Tooltip of a button that is disabled for viewers."""


def account_line() -> None:
    """Draw the user's name, role and logout link at the upper right of the page."""
    who = principal()
    if who.name:
        leave = Markup('<a href="logout" target="_self">log out</a>')
        st.html(
            el("div", el("span", fmt.shorten(who.name, 40), title=who.name), f" · {who.role} · ", leave, cls="rl-who")
        )


def signature() -> None:
    """Draw the user name that is recorded with a command: ``Signed in as ann (operator)``."""
    who = principal()
    name = el("b", who.name or "anonymous")
    st.html(el("div", "Signed in as ", name, f" ({who.role or 'not logged in'})", cls="rl-quiet"))


def store_line(*facts: str) -> None:
    """Draw ``facts`` and the address of the store in small print at the right."""
    st.html(el("div", joined("  ·  ".join((*facts, f"store {fmt.shorten(store_url(), 160)}"))), cls="rl-store"))


def run_head(run: RunInfo, what: str) -> DeltaGenerator:
    """Draw the name of a run as the head of its page ``what``, with a switch for live updates if it runs.

    Returns the row for the page's buttons.
    """
    row = st.container(horizontal=True, vertical_alignment="center", gap="small", key="run-head")
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project")
    shown = fmt.shorten(run.name or run.run_id, 160)
    row.html(el("div", project, shown, el("span", f" · {what}", cls="rl-project"), cls="rl-name"), width="stretch")
    if run.state is RunState.RUNNING:
        row.toggle("Live", value=True, key="live", bind="query-params", help="Refresh automatically")
    return row


@contextmanager
def readable(what: str = "The store") -> Iterator[None]:
    """Draw a message instead of a traceback if the block raises an error because ``what`` cannot be read."""
    try:
        yield
    except RunNotFoundError as error:
        st.warning("Run not found in this store.", icon=":material/search_off:")
        st.code(str(error), language=None, wrap_lines=True)
    except RLWatchError as error:
        st.error(f"{what} cannot be read. This page retries automatically.", icon=":material/error:")
        st.code(str(error), language=None, wrap_lines=True)
