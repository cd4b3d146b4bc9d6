"""Around every page: which pages there are, the one the address names, and how they look."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import streamlit as st

from .views import alerts, run, runs

if TYPE_CHECKING:
    from streamlit.navigation.page import StreamlitPage

STYLE = """<style>
[data-testid="stMainBlockContainer"] { padding-top: 4.2rem; padding-bottom: 3rem; max-width: 1500px; }
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


def show() -> None:
    """Draw the app: the page the address names."""
    st.set_page_config(page_title="rlwatch", page_icon="◉", layout="wide")
    st.html(STYLE)
    page = st.navigation(list(pages().values()), position="top")
    page.run()


def pages() -> dict[str, StreamlitPage]:
    """Every page by its name in the address; the run page is reached through a run."""
    return {
        "runs": st.Page(partial(runs.page, go_to_run), title="Runs", url_path="runs", default=True),
        "run": st.Page(run.page, title="Run", url_path="run", visibility="hidden"),
        "alerts": st.Page(partial(alerts.page, go_to_run), title="Alerts", url_path="alerts"),
    }


def go_to_run(run_id: str) -> None:
    """Leave for the page of a run."""
    st.switch_page(pages()["run"], query_params={"run": run_id})
