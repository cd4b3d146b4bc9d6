"""Around every page: navigation, theme, the store's name, and a plain message where it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import streamlit as st

from rlwatch.errors import RLWatchError, RunNotFoundError

from . import format as fmt
from .charts import DARK, LIGHT, Ink
from .markup import el, joined
from .queries import store_url

if TYPE_CHECKING:
    from streamlit.navigation.page import StreamlitPage

REFRESH_S = 5.0
"""How often a live page looks again, in seconds."""

STYLE = """<style>
[data-testid="stMainBlockContainer"] { padding-top: 4.2rem; padding-bottom: 3rem; max-width: 1500px; }
[data-testid="stHeader"] { background: transparent; }
.rl-store { text-align: right; font-size: .75rem; opacity: .6; overflow-wrap: anywhere; }
.rl-name { font-size: 1.5rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.rl-project { font-weight: 400; opacity: .6; }
.rl-head { font-size: 1.5rem; font-weight: 600; line-height: 1.3; }
.rl-facts { font-size: .875rem; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-variant-numeric: tabular-nums; }
.rl-facts .label { opacity: .6; }
.rl-word { font-weight: 600; white-space: nowrap; }
.rl-why { font-size: .95rem; margin-top: .5rem; overflow-wrap: anywhere; }
.rl-why .label { opacity: .6; margin-right: .75rem; }
.rl-why .arrow { opacity: .5; padding: 0 .4rem; }
.rl-family { font-size: 1rem; font-weight: 600; margin: .9rem 0 .1rem; }
.rl-quiet { font-size: .8rem; opacity: .6; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
</style>"""


def run() -> None:
    """Draw the app: the page the address names."""
    st.set_page_config(page_title="rlwatch", page_icon="◉", layout="wide")
    st.html(STYLE)
    page = st.navigation(list(pages().values()), position="top")
    page.run()


def pages() -> dict[str, StreamlitPage]:
    """Every page by its name in the address; the run page is reached through a run."""
    from .views import alerts, run, runs

    return {
        "runs": st.Page(runs.page, title="Runs", url_path="runs", default=True),
        "run": st.Page(run.page, title="Run", url_path="run", visibility="hidden"),
        "alerts": st.Page(alerts.page, title="Alerts", url_path="alerts"),
    }


def go_to_run(run_id: str) -> None:
    """Leave for the page of a run."""
    st.switch_page(pages()["run"], query_params={"run": run_id})


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
