"""The dialog in which a person takes an alert on."""

from __future__ import annotations

import streamlit as st

from rlwatch.control.request import whoami
from rlwatch.errors import RLWatchError
from rlwatch.records import Alert

from .. import alarms, queries
from .. import format as fmt

PENDING = "take-pending"
"""Session key of the id of the alert that is to be taken on, while the dialog is open."""


def open_for(alert_id: str) -> None:
    """Open the dialog for an alert."""
    st.session_state[PENDING] = alert_id


def close() -> None:
    """Forget the dialog."""
    st.session_state.pop(PENDING, None)


def dialog_if_open() -> None:
    """The dialog, if it is open. It lives in the session: a rerun does not close it."""
    alert_id = st.session_state.get(PENDING)
    found = [alert for alert in queries.alerts() if alert.alert_id == alert_id] if alert_id else []
    if found:
        st.dialog("Acknowledge the alert", width="medium", on_dismiss=close)(_dialog)(found[0])


def _dialog(alert: Alert) -> None:
    st.text(f"{alarms.message_words(alert)}, since step {fmt.step(alert.onset_step)}")
    st.caption(
        "Nobody is reminded of it and it does not escalate any more, unless it gets worse. Its end is still told."
    )
    why = st.text_input(
        "What you do about it", key="take-why", max_chars=300, placeholder="shown to whoever looks next"
    )
    by = st.text_input("Who", value=whoami(), key="take-by", max_chars=80)
    send, cancel = st.columns([1, 1])
    if send.button("Acknowledge", type="primary", key="take", width="stretch"):
        _take(alert, by=by or whoami(), why=why or "")
    if cancel.button("Cancel", key="take-cancel", width="stretch"):
        close()
        st.rerun()


def _take(alert: Alert, *, by: str, why: str) -> None:
    try:
        kept = alarms.take(queries.store(), alert.alert_id, by=by, why=why)
    except RLWatchError as error:
        st.error("The alert was not acknowledged.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close()
    st.toast(f"Acknowledged by {fmt.shorten(kept.by, 80)}", icon=":material/check:")
    st.rerun()
