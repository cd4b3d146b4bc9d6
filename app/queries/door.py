"""The open store, and how far a run has come: what every cached read is keyed by."""

from __future__ import annotations

import os

import streamlit as st

from rlwatch.ports import Store
from rlwatch.records import RunInfo
from rlwatch.store.url import open_store

DEFAULT_STORE = "./rlwatch-runs"

Version = tuple[str, int, int, float, str]
"""Run id, attempt, last step, its time, state."""


def store_url() -> str:
    """The store this app shows: ``RLWATCH_STORE``, set by ``rlwatch ui``."""
    return os.environ.get("RLWATCH_STORE") or DEFAULT_STORE


def store() -> Store:
    """The open store (one for all sessions). Raises ``StoreError`` where it cannot be opened."""
    return _opened(store_url())


@st.cache_resource(show_spinner=False)
def _opened(url: str) -> Store:
    return open_store(url)


def version(run: RunInfo) -> Version:
    """Changes whenever the run has new rows or another state."""
    return (run.run_id, run.attempt, run.last_step or 0, run.last_ts or 0.0, run.state.value)
