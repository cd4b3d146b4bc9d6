"""The dialog that asks something of a live run."""

from __future__ import annotations

import time
from collections.abc import Mapping

import streamlit as st

from rlwatch.control.commands import COMMAND_KINDS, Choice, Number
from rlwatch.errors import RLWatchError
from rlwatch.records import JSON, RunInfo

from .. import control, pauses, queries, shell
from .. import format as fmt
from ..asks import ASKS, Ask
from ..health import AMBER, BLUE, GREY, Word, judge
from ..markup import Markup, el, joined

PENDING = "ask-pending"
"""Session key of ``(run id, kind, idempotency key)`` while the dialog is open."""

CHECK_LOOK = {True: ("✓", BLUE), None: ("◌", GREY), False: ("▲", AMBER)}


def open_for(run_id: str, kind: str) -> None:
    """Open the dialog for a run, with a fresh idempotency key."""
    st.session_state[PENDING] = (run_id, kind, control.new_key())


def open_chosen(run_id: str, menu_key: str) -> None:
    """Open it for what was chosen in the menu."""
    kind = str(st.session_state.get(menu_key))
    if kind in ASKS:
        open_for(run_id, kind)


def close() -> None:
    """Forget the dialog."""
    st.session_state.pop(PENDING, None)


def dialog_if_open(run: RunInfo) -> None:
    """The dialog, if it is open for this run. It lives in the session: a rerun does not close it."""
    run_id, kind, key = st.session_state.get(PENDING, ("", "", ""))
    if run_id == run.run_id:
        st.dialog(ASKS[kind].title, width="medium", on_dismiss=close)(_dialog)(run, ASKS[kind], key)


def _dialog(run: RunInfo, ask: Ask, key: str) -> None:
    st.markdown(ask.says)
    st.html(joined(*(_check(check) for check in _checks(run, ask.kind))))
    args = _arguments(ask)
    why = st.text_input("Why", key="why", max_chars=300, placeholder="kept with the command, for whoever asks later")
    force = COMMAND_KINDS[ask.kind].vetoed and st.checkbox("Force: even during a collapse", key="force")
    typed = st.text_input(f"Type {_quoted(run)} to confirm", key="typed", live=True) if ask.typed else ""
    shell.signed()
    send, cancel = st.columns([1, 1])
    ready = control.may_send(run, ask.kind, typed or "")
    if send.button("Send", type="primary", disabled=not ready, key="send", width="stretch"):
        _send(run, ask, key, args, why=why or "", force=bool(force))
    if cancel.button("Cancel", key="cancel", width="stretch"):
        close()
        st.rerun()


def _arguments(ask: Ask) -> dict[str, JSON]:
    """What the kind takes, each by a widget of its type; what is left empty is not sent."""
    args: dict[str, JSON] = {}
    for name, argument in COMMAND_KINDS[ask.kind].args.items():
        label, key = ask.labels.get(name, name), f"arg-{name}"
        if isinstance(argument, Choice):
            args[name] = st.radio(label, argument.values, format_func=lambda v: ask.values.get(v, v), key=key)
        elif isinstance(argument, Number):
            args[name] = _number(ask, name, argument, label, key)
        else:
            args[name] = st.number_input(label, min_value=1, value=None, step=1, key=key)
    return {name: value for name, value in args.items() if value is not None}


def _number(ask: Ask, name: str, argument: Number, label: str, key: str) -> float | None:
    default = argument.default if isinstance(argument.default, float) else ask.suggested.get(name)
    high = argument.high if argument.high < 1e6 else None
    return st.number_input(label, min_value=argument.low, max_value=high, value=default, format="%g", key=key)


def _quoted(run: RunInfo) -> str:
    """The confirmation word for a label, in which Markdown must stay text."""
    return "".join(
        f"\\{c}" if not c.isalnum() and c.isascii() and not c.isspace() else c for c in control.confirmation(run)
    )


def _checks(run: RunInfo, kind: str) -> list[control.Check]:
    alerts, vitals, now = queries.alerts(run.run_id), queries.vitals(run), time.time()
    word = judge(run, alerts, now, vitals.pace).word
    names = queries.canonical_names(queries.metric_names(run), run.source)
    has_reference = True if any(name.startswith("policy/kl_ref") for name in names) else None
    paused = pauses.pause_of(run, queries.commands(run.run_id), now) is not None
    found = control.checks(
        kind, run, alerts, stale=word is Word.STALE, has_reference=has_reference, paused=paused, dead=word is Word.DEAD
    )
    return [*found, *_now(run, kind, names)]


def _now(run: RunInfo, kind: str, names: Mapping[str, str]) -> list[control.Check]:
    """What the quantity is now that is to be changed, if it is recorded."""
    canonical, words = {
        "lower-lr": ("optim/lr", "the learning rate is"),
        "set-kl-coef": ("policy/kl_coef", "the KL coefficient is"),
    }.get(kind, ("", ""))
    last = queries.last_values(run.run_id).get(names.get(canonical, ""))
    if last is None:
        return []
    step, value = last
    return [control.Check(True, f"{words} {fmt.number(value)} now (step {fmt.step(step)})")]


def _check(check: control.Check) -> Markup:
    shape, colour = CHECK_LOOK[check.met]
    mark = el("span", shape, style=f"color:{colour};flex:0 0 1.4em")
    return el("div", mark, el("span", check.text), style="display:flex")


def _send(run: RunInfo, ask: Ask, key: str, args: dict[str, JSON], *, why: str, force: bool) -> None:
    by = shell.principal()
    try:
        sent = control.send(queries.store(), run.run_id, ask.kind, args, why=why, by=by, force=force, key=key)
    except RLWatchError as error:
        st.error("The command was not sent.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close()
    st.toast(f"Queued: {sent.kind}", icon=":material/schedule_send:")
    st.rerun()
