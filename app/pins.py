"""Starred metrics of a project: kept in the store, so that its next run and whoever looks begins with them."""

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
"""Act of an entry of the audit, whose text says project and names; the newest of a project counts."""
MOST = 24
SEEN_S = 5.0
"""Seconds until somebody else's stars are seen."""


def pins_of(project: str) -> tuple[str, ...]:
    """Starred metrics of a project; none where nobody starred any, or they cannot be read."""
    try:
        return _pins(store_url()).get(project, ())
    except RLWatchError:
        return ()


@st.cache_data(show_spinner=False, ttl=SEEN_S, max_entries=4)
def _pins(url: str) -> dict[str, tuple[str, ...]]:  # noqa: ARG001  (the key)
    found = {}
    for entry in store().audit():
        if entry.act == ACT:
            said = json.loads(entry.text)
            found[said["project"]] = tuple(said["names"])
    return found


def keep_pins(place: Store, project: str, names: Sequence[str], by: Principal) -> None:
    """Star these metrics of a project, for everybody.

    Raises ``NotPermittedError`` unless ``by`` is an operator, and ``StoreError``.
    """
    by.require_command()
    text = json.dumps({"project": project, "names": list(names)[:MOST]})
    place.put_entry(AuditEntry(uuid.uuid4().hex, time.time(), by.name, ACT, text))
    _pins.clear()
