"""On a run's page: what most likely caused its trouble, and what to do about it; and its post-mortem as a file."""

from __future__ import annotations

import streamlit as st

from .. import queries, remedies, shell
from ..markup import joined


def show(run_id: str) -> None:
    """Two lines and a fold while something fires or after a crash; nothing of a healthy run."""
    with shell.readable("This run"):
        run = queries.run(run_id)
        if not remedies.in_trouble(run, queries.alerts(run_id)):
            return
        said = queries.diagnosis(run)
        if not said.causes:
            return
        st.html(joined(remedies.cause_line(said), remedies.do_line(said)))
        with st.expander("Why, and what to do in order", key="remedies"):
            st.html(joined(remedies.full(said)))
            st.download_button(
                "Report",
                data=lambda: queries.report(run_id),
                file_name=f"{run_id}-report.html",
                mime="text/html",
                key="report",
                icon=":material/description:",
                help="The post-mortem in one file that loads nothing: why, what to do, charts, tokens, findings",
                on_click="ignore",
            )
