"""Nothing recorded yet: what to add to a trainer, ready to copy."""

from __future__ import annotations

import shlex
from pathlib import Path

import streamlit as st

from .. import queries
from ..markup import el

TRL = """\
from rlwatch.integrations.trl import watch
watch(trainer, project="my-project")
trainer.train()"""

LOOP = """\
import rlwatch
run = rlwatch.init(project="my-project")
run.log({"reward": r, "entropy": h, "grad_norm": g}, step=step)"""


def show() -> None:
    """The three lines, the store to write to, and other ways to begin."""
    url = queries.store_url()
    st.html(el("div", "No runs yet", cls="rl-head"))
    st.caption("This page fills by itself as soon as a run writes to the store below.")
    st.html(el("div", "Add three lines to a trainer", cls="rl-family"))
    trl, loop = st.columns(2, gap="large")
    with trl:
        st.caption("TRL")
        st.code(TRL, language="python")
    with loop:
        st.caption("A loop of your own")
        st.code(LOOP, language="python")
    st.caption("and start it where it finds this store")
    st.code(f"export RLWATCH_STORE={shlex.quote(_absolute(url))}", language="bash")
    st.html(el("div", "Or begin without a trainer", cls="rl-family"))
    scan, demo = st.columns(2, gap="large")
    with scan:
        st.caption("Look at a log you already have")
        st.code("rlwatch scan train.log", language="bash")
    with demo:
        st.caption("Watch a small training run collapse")
        st.code("rlwatch demo", language="bash")


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())
