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
run.log({"reward": reward, "entropy": entropy, "grad_norm": norm}, step=step)"""


def show() -> None:
    """The three lines, the store to write to, and other ways to begin."""
    url = queries.store_url()
    st.html(el("div", "No runs yet", cls="rl-head"))
    st.caption("This page fills by itself as soon as a run writes to the store below.")
    trl, loop = st.columns(2, gap="large")
    with trl:
        st.markdown("**A TRL trainer**: three lines")
        st.code(TRL, language="python")
    with loop:
        st.markdown("**A loop of your own**: three lines")
        st.code(LOOP, language="python")
    st.markdown("Both write to the store this page shows when the trainer is started with")
    st.code(f"export RLWATCH_STORE={shlex.quote(_absolute(url))}", language="bash")
    st.markdown("Or look at a log you already have, or watch a small training crash and be seen crashing:")
    st.code("rlwatch scan train.log", language="bash")
    st.code("rlwatch demo", language="bash")


def _absolute(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().absolute())
