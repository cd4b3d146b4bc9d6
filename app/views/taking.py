"""The dialog in which a person takes an alert on."""

from __future__ import annotations

import streamlit as st

from rlwatch.errors import RLWatchError
from rlwatch.records import Alert, RunInfo

from .. import alarms, queries, shell
from .. import format as fmt
from ..health import LOOKS, SEVERITY_WORD
from ..markup import Markup, el, joined

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
    st.html(joined(subject(alert, queries.runs_by_id().get(alert.run_id))))
    st.text(alarms.message_words(alert))
    st.caption(
        "Nobody is reminded of it and it does not escalate any more, unless it gets worse. Its end is still told."
    )
    why = st.text_input(
        "What you do about it", key="take-why", max_chars=300, placeholder="shown to whoever looks next"
    )
    shell.signed()
    send, cancel = st.columns([1, 1])
    if send.button("Acknowledge", type="primary", key="take", width="stretch"):
        _take(alert, why=why or "")
    if cancel.button("Cancel", key="take-cancel", width="stretch"):
        close()
        st.rerun()


def subject(alert: Alert, run: RunInfo | None) -> Markup:
    """The run, what fires on it, how bad, since when and by which rule; ``run`` None: only its id is known."""
    look = LOOKS[SEVERITY_WORD[alert.severity]]
    project = el("span", f"{fmt.shorten(run.project, 60)} / ", cls="rl-project") if run else ""
    name = fmt.shorten((run.name if run else "") or alert.run_id, 240)
    bad = el("span", el("span", look.shape, style=f"color:{look.colour}"), f" {alert.severity.value}", cls="rl-word")
    facts = (fmt.words(alert.kind), f"since step {fmt.step(alert.onset_step)}", f"rule {fmt.shorten(alert.rule, 40)}")
    return joined(
        el("div", project, name, cls="rl-family"), el("div", bad, *(el("span", fact) for fact in facts), cls="rl-facts")
    )


def _take(alert: Alert, *, why: str) -> None:
    try:
        kept = alarms.take(queries.store(), alert.alert_id, by=shell.principal(), why=why)
    except RLWatchError as error:
        st.error("The alert was not acknowledged.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close()
    st.toast(f"Acknowledged by {fmt.shorten(kept.by, 80)}", icon=":material/check:")
    st.rerun()
