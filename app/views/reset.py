"""The dialog that asks a live run to take its policy as the new reference."""

from __future__ import annotations

import time

import streamlit as st

from rlwatch.control.request import whoami
from rlwatch.errors import RLWatchError
from rlwatch.records import RunInfo

from .. import control, queries
from .. import format as fmt
from ..health import AMBER, BLUE, GREY, Word, judge
from ..markup import Markup, el, joined

PENDING = "reset-pending"
"""Session key of ``(run id, idempotency key)`` while the dialog is open."""

CHECK_LOOK = {True: ("✓", BLUE), None: ("◌", GREY), False: ("▲", AMBER)}


def open_for(run_id: str) -> None:
    """Open the dialog for a run, with a fresh idempotency key."""
    st.session_state[PENDING] = (run_id, control.new_key())


def close() -> None:
    """Forget the dialog."""
    st.session_state.pop(PENDING, None)


def dialog_if_open(run: RunInfo) -> None:
    """The dialog, if it is open for this run. It lives in the session: a rerun does not close it."""
    run_id, key = st.session_state.get(PENDING, ("", ""))
    if run_id == run.run_id:
        st.dialog("Reset the reference", width="medium", on_dismiss=close)(_dialog)(run, key)


def _dialog(run: RunInfo, key: str) -> None:
    checks = _checks(run)
    st.markdown(
        "At the next generation boundary the trainer takes **the policy as it is then** as its new reference, "
        "so KL starts again from zero. This cannot be undone."
    )
    st.html(joined(*(_check(check) for check in checks)))
    optimizer = st.radio(
        "Optimizer state", list(control.OPTIMIZER), format_func=control.OPTIMIZER.__getitem__, key="opt"
    )
    why = st.text_input("Why", key="why", max_chars=300, placeholder="kept with the command, for whoever asks later")
    by = st.text_input("Who", value=whoami(), key="by", max_chars=80)
    force = st.checkbox("Force: reset even during a collapse", key="force")
    typed = st.text_input(f"Type {_quoted(run)} to confirm", key="typed", live=True)
    send, cancel = st.columns([1, 1])
    ready = control.may_send(run, typed or "")
    if send.button("Send", type="primary", disabled=not ready, key="send", width="stretch"):
        _send(run, key, optimizer=optimizer, why=why or "", by=by or "", force=force)
    if cancel.button("Cancel", key="cancel", width="stretch"):
        close()
        st.rerun()


def _quoted(run: RunInfo) -> str:
    """The confirmation word for a label, in which Markdown must stay text."""
    return "".join(
        f"\\{c}" if not c.isalnum() and c.isascii() and not c.isspace() else c for c in control.confirmation(run)
    )


def _checks(run: RunInfo) -> list[control.Check]:
    alerts, vitals = queries.alerts(run.run_id), queries.vitals(run)
    stale = judge(run, alerts, time.time(), vitals.step_s).word is Word.STALE
    names = queries.canonical_names(queries.metric_names(run), run.source)
    has_reference = True if any(name.startswith("policy/kl_ref") for name in names) else None
    return control.reset_checks(run, alerts, stale=stale, has_reference=has_reference)


def _check(check: control.Check) -> Markup:
    shape, colour = CHECK_LOOK[check.met]
    mark = el("span", shape, style=f"color:{colour};flex:0 0 1.4em")
    return el("div", mark, el("span", check.text), style="display:flex")


def _send(run: RunInfo, key: str, *, optimizer: str, why: str, by: str, force: bool) -> None:
    try:
        sent = control.send(queries.store(), run.run_id, optimizer=optimizer, why=why, by=by, force=force, key=key)
    except RLWatchError as error:
        st.error("The command was not sent.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close()
    st.toast(f"Queued: {sent.kind}", icon=":material/schedule_send:")
    st.rerun()
