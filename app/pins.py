"""Starred metrics of a project, kept in the store for later runs and all users."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence

import streamlit as st

from rlwatch.errors import RLWatchError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry

from .principal import Principal
from .queries import store, store_url

ACT = "pins"
"""Action of an audit entry whose text holds project and names; the newest entry of a project counts."""
MOST = 24
SEEN_S = 5.0
"""Seconds until another user's stars are visible."""


def pins_of(project: str) -> tuple[str, ...]:
    """Return the starred metrics of a project; empty if there are none or they cannot be read."""
    try:
        return _pins(store_url()).get(project, ())
    except RLWatchError:
        return ()


@st.cache_data(show_spinner=False, ttl=SEEN_S, max_entries=4)
def _pins(url: str) -> dict[str, tuple[str, ...]]:  # noqa: ARG001  (the key)
    found = {}
    for entry in store().audit():
        if entry.act == ACT:
            content = json.loads(entry.text)
            found[content["project"]] = tuple(content["names"])
    return found


def keep_pins(place: Store, project: str, names: Sequence[str], by: Principal) -> None:
    """Star these metrics of a project, for all users.

    Raises ``NotPermittedError`` unless ``by`` is an operator, and ``StoreError``.
    """
    by.require_command()
    text = json.dumps({"project": project, "names": list(names)[:MOST]})
    place.put_entry(AuditEntry(uuid.uuid4().hex, time.time(), by.name, ACT, text))
    _pins.clear()
