"""Navigation of the dashboard: its pages, the page in the address, and their style."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import streamlit as st

from . import (
    alerts_page,
    compare_page,
    forecasts_page,
    layout,
    rollouts_page,
    rules_page,
    run_page,
    runs_page,
    tokens_page,
)
from .markup import DARK_STYLE, STYLE

if TYPE_CHECKING:
    from streamlit.navigation.page import StreamlitPage


def show() -> None:
    """Draw the page that the browser's address names."""
    st.set_page_config(page_title="rlwatch", page_icon="◉", layout="wide")
    st.html(STYLE)
    if st.context.theme.type == "dark":
        st.html(DARK_STYLE)
    if not layout.principal().name:
        st.error("This dashboard has no login: start it with rlwatch ui.", icon=":material/door_front:")
        st.stop()
    page = st.navigation(list(pages().values()), position="top")
    page.run()
    spare_the_loaded()


@cache
def spare_the_loaded() -> None:
    """Exclude the objects loaded so far from garbage collection.

    Streamlit runs a full collection after each fragment of a page, which takes tens of milliseconds, nearly all of them
    for modules.
    """
    gc.collect()
    gc.freeze()


def pages() -> dict[str, StreamlitPage]:
    """Return every page by its name in the address."""
    return {
        "runs": st.Page(
            partial(_page, runs_page.page, go_to_run, go_to_compare), title="Runs", url_path="runs", default=True
        ),
        "run": st.Page(partial(_page, run_page.page, go_to_tokens), title="Run", url_path="run", visibility="hidden"),
        "tokens": st.Page(
            partial(_page, tokens_page.page, go_to_run, go_to_rollouts),
            title="Tokens",
            url_path="tokens",
            visibility="hidden",
        ),
        "rollouts": st.Page(
            partial(_page, rollouts_page.page, go_to_run, go_to_tokens),
            title="Rollouts",
            url_path="rollouts",
            visibility="hidden",
        ),
        "compare": st.Page(partial(_page, compare_page.page, go_to_run), title="Compare", url_path="compare"),
        "alerts": st.Page(partial(_page, alerts_page.page, go_to_run), title="Incidents", url_path="alerts"),
        "rules": st.Page(partial(_page, rules_page.page), title="Rules", url_path="rules"),
        "forecasts": st.Page(partial(_page, forecasts_page.page, go_to_run), title="Forecasts", url_path="forecasts"),
    }


def _page(body: Callable[..., None], *leave: Callable[..., None]) -> None:
    """Wrap a page with the account line. Each page draws the line itself, because elements outside of the pages remain
    while one page replaces another, and fragments of the old page that still run would lose their places.
    """
    layout.account_line()
    body(*leave)


def go_to_run(run_id: str) -> None:
    """Open the page of the run with the given id."""
    st.switch_page(pages()["run"], query_params={"run": run_id})


def go_to_compare(run_ids: Sequence[str]) -> None:
    """Open the page that compares the runs with the given ids."""
    st.switch_page(pages()["compare"], query_params={"runs": list(run_ids)})


def go_to_rollouts(run_id: str, step: int | None) -> None:
    """Open the page with the rollouts of a run, of one step if it is given."""
    span = {} if step is None else {"from": str(step), "to": str(step)}
    st.switch_page(pages()["rollouts"], query_params={"run": run_id, **span})


def go_to_tokens(run_id: str, step: int) -> None:
    """Open the page with the tokens of a run at a step."""
    st.switch_page(pages()["tokens"], query_params={"run": run_id, "step": str(step)})
