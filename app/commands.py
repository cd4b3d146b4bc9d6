"""Commands to a live run: their texts and preconditions, and the dialog that sends them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import streamlit as st

from rlwatch.clock import Clock
from rlwatch.control.commands import (
    COMMAND_KINDS,
    ROLLBACK,
    UNDO_LAST,
    Argument,
    Choice,
    Number,
    SnapshotChoice,
    cancel,
    request,
)
from rlwatch.control.liveness import dead_since, silent_for
from rlwatch.control.policy import COLLAPSE_KINDS
from rlwatch.errors import RLWatchError
from rlwatch.ports import CommandStore
from rlwatch.records import JSON, Alert, AlertState, Command, CommandStatus, RunInfo, RunState, Severity

from . import format as fmt
from . import health, layout, queries
from .health import AMBER, BLUE, GREY
from .markup import Markup, el, joined
from .principal import Principal

RESET = "reset-reference"


@dataclass(frozen=True, slots=True)
class CommandForm:
    """Texts of the dialog for one command. ``explanation`` is Markdown; ``typed``: the run's name must be typed to
    confirm.

    ``labels`` and ``values`` name the arguments and the values of choices.
    """

    kind: str
    menu: str
    title: str
    explanation: str
    typed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    suggested: Mapping[str, float] = field(default_factory=dict)


_FORMS = (
    CommandForm(
        RESET,
        "Reset reference…",
        "Reset the reference",
        "At the next generation boundary the trainer takes **the policy as it is then** as its new reference, "
        "so KL starts again from zero. This cannot be undone.",
        typed=True,
        labels={"optimizer": "Optimizer state"},
        values={
            "clear": "cleared: a fresh start (ProRL v1)",
            "keep": "kept: momentum carries on (ProRL v2)",
        },
    ),
    CommandForm(
        "save-checkpoint",
        "Save checkpoint…",
        "Save a checkpoint",
        "At the next boundary the trainer saves a checkpoint, as it would by its own schedule.",
    ),
    CommandForm(
        "lower-lr",
        "Lower learning rate…",
        "Lower the learning rate",
        "From the next boundary on the learning rate is a **fraction of the scheduled one**. A second command "
        "replaces the first; a fraction of 1 gives the rate back to the schedule.",
        labels={"scale": "Fraction of the schedule", "until": "Until step (empty: no end)", "freeze": "Schedule"},
        values={"no": "goes on", "yes": "frozen: the rate stays"},
        suggested={"scale": 0.3},
    ),
    CommandForm(
        "raise-lr",
        "Raise learning rate…",
        "Raise the learning rate",
        "From the next boundary on the learning rate is a **multiple of the scheduled one**: after a rollback "
        "and quiet steps, back to 1.",
        labels={"scale": "Multiple of the schedule"},
        suggested={"scale": 1.0},
    ),
    CommandForm(
        "set-kl-coef",
        "KL coefficient…",
        "Change the KL coefficient",
        "From the next boundary on the KL term has **this weight** (beta).",
        labels={"value": "KL coefficient"},
    ),
    CommandForm(
        ROLLBACK,
        "Roll back…",
        "Roll back to a snapshot",
        "At the next boundary **weights and optimizer become those of a snapshot**, and training goes on from there. "
        "The present state is kept as a snapshot, so that a roll-back to its step takes this back. "
        "The reference, the KL coefficient and a lowered learning rate stay.",
        typed=True,
        labels={"to": "Step of the snapshot (empty: the last good one)"},
    ),
    CommandForm(
        "set-clip",
        "Clip range…",
        "Change the clip range",
        "From the next batch on importance ratios are clipped to **1 - low** to **1 + high**.",
        labels={"low": "Low", "high": "High (empty: the same as low)"},
        suggested={"low": 0.2},
    ),
    CommandForm(
        "set-grad-clip",
        "Gradient clipping…",
        "Change the gradient clipping",
        "From the next step on gradients are clipped to **this norm**.",
        labels={"value": "Largest norm"},
        suggested={"value": 1.0},
    ),
    CommandForm(
        "set-entropy-coef",
        "Entropy bonus…",
        "Change the entropy bonus",
        "From the next batch on the entropy bonus has **this weight**.",
        labels={"value": "Entropy coefficient"},
        suggested={"value": 0.0},
    ),
    CommandForm(
        "set-is-correction",
        "Importance correction…",
        "Change the correction of importance ratios",
        "From the next batch on the ratios of trainer to rollout engine are corrected **in this way**.",
        labels={"mode": "Correction", "cap": "Largest ratio (empty: as it is)"},
        values={
            "token_truncate": "truncated by token (TIS)",
            "token_mask": "masked by token",
            "sequence_truncate": "truncated by sequence",
            "sequence_mask": "masked by sequence (MIS)",
            "off": "off: not corrected",
        },
    ),
    CommandForm(
        "sync-weights",
        "Sync weights…",
        "Send the weights to the rollout engine",
        "Before the next batch the rollout engine **loads the weights again**.",
    ),
    CommandForm(
        "hold",
        "Hold updates…",
        "Hold the weights while batches are sampled",
        "From the next boundary on batches are sampled and **nothing is updated**. The rewards show if the fault lies "
        "in the policy or outside. Updates go on by themselves afterwards.",
        labels={"batches": "Batches"},
        suggested={"batches": 3},
    ),
    CommandForm(
        "skip-step",
        "Skip updates…",
        "Leave updates out",
        "The next updates are **left out**: their gradients are dropped, and weights and optimizer stay as they are.",
        labels={"steps": "Updates", "when": "Which"},
        values={"always": "every one", "nonfinite": "those whose gradient is NaN or infinite"},
        suggested={"steps": 1},
    ),
    CommandForm(
        UNDO_LAST,
        "Undo last command…",
        "Undo the last command",
        "The last command **is taken back**, if it can be: a setting, a learning rate, a rollback. "
        "A reset of the reference, a checkpoint and a stop cannot be.",
    ),
    CommandForm(
        "pause",
        "Pause…",
        "Pause the training",
        "At the next boundary training waits, holding its GPUs, until you resume or stop it. "
        "It resumes by itself when the time is up. Other commands still run meanwhile.",
        labels={"minutes": "Maximum, minutes"},
    ),
    CommandForm("resume", "Resume…", "Resume the training", "Training continues where it paused."),
    CommandForm(
        "stop",
        "Stop…",
        "Stop the training",
        "At the next boundary training **ends**, as if it had reached its last step. Restart it from "
        "where it was launched.",
        typed=True,
        labels={"save": "Checkpoint"},
        values={
            "yes": "saved first",
            "no": "not saved: progress since the last checkpoint is lost",
        },
    ),
)

FORMS: Mapping[str, CommandForm] = {form.kind: form for form in _FORMS}
"""Dialog texts of every command, by its kind."""


def menu_kinds(*, paused: bool) -> list[str]:
    """Return the kinds of command in the menu, without the one that has a button (reset or, for a
    paused run, resume).
    """
    first = {"resume", "pause"} if paused else {"resume", RESET}
    return [kind for kind in FORMS if kind not in first]


# Sending a command, and the checks that can be made beforehand.

TYPEABLE = 40
"""Longest name, in characters, that the dialog asks a user to type."""

NEEDS_REFERENCE = frozenset({RESET, "set-kl-coef"})

REFUSED = {
    RESET: "a reset now would make the collapsing policy the anchor, and will be refused unless forced",
    "save-checkpoint": "where the trainer keeps only the newest checkpoints, a save may delete the last good one and "
    "will be refused unless forced",
    "raise-lr": "a higher rate would speed the collapse up, and will be refused unless forced",
    "set-kl-coef": "a lower coefficient would free the collapsing policy, and will be refused unless forced",
    UNDO_LAST: "what would be refused as a command of its own will be refused here, too, unless forced",
}
"""Consequence of sending each command while a collapse fires, for the commands that rlwatch may refuse."""


@dataclass(frozen=True, slots=True)
class Precondition:
    """One precondition of a command: ``met`` is True, False, or None if only the trainer knows."""

    met: bool | None
    text: str


def new_key() -> str:
    """Return a new idempotency key for one opening of the dialog, so that a double click sends one command."""
    return uuid.uuid4().hex


def checks(
    kind: str,
    run: RunInfo,
    alerts: Sequence[Alert],
    *,
    stale: bool,
    has_reference: bool | None,
    paused: bool = False,
    dead: bool = False,
) -> list[Precondition]:
    """Return the preconditions of sending the command ``kind`` to a run, each checked as far as the store allows.

    Parameters
    ----------
    kind, run, alerts
        The command, the run, and the alerts of the run.
    stale, dead, paused
        State of the trainer.
    has_reference
        True if the trainer has a reference model, None if unknown.
    """
    found = [_alive(run, stale=stale and not paused, dead=dead and not paused)]
    if kind in NEEDS_REFERENCE:
        found.append(Precondition(has_reference, _reference_words(has_reference)))
    if kind in REFUSED:
        collapse = collapsing(alerts)
        found.append(Precondition(not collapse, _collapse_words(kind, collapse)))
    if kind == "save-checkpoint" and paused:
        found.append(Precondition(None, "the run is paused: the trainer saves once it resumes"))
    if kind == "resume":
        found.append(
            Precondition(paused or None, "the run is paused" if paused else "the run does not seem to be paused")
        )
    return found


def collapsing(alerts: Sequence[Alert]) -> list[Alert]:
    """Return the firing critical alerts of a collapse; while there are any, the trainer refuses some commands."""
    critical = [a for a in alerts if a.state is AlertState.FIRING and a.severity is Severity.CRITICAL]
    return sorted((a for a in critical if a.kind in COLLAPSE_KINDS), key=lambda alert: alert.onset_step)


def _alive(run: RunInfo, *, stale: bool, dead: bool) -> Precondition:
    if run.state is not RunState.RUNNING:
        return Precondition(False, f"the run has {run.state.value}: no trainer will run the command")
    if dead:
        return Precondition(False, "the trainer is dead: the command expires unless it is restarted")
    if stale:
        return Precondition(None, "no recent step: the command expires unless the run continues")
    return Precondition(True, "the run is live")


def _reference_words(has_reference: bool | None) -> str:
    if has_reference:
        return "the run logs KL to a reference"
    return "no KL to a reference is logged: the trainer refuses if it has no reference"


def _collapse_words(kind: str, collapse: Sequence[Alert]) -> str:
    if not collapse:
        return "no collapse is firing"
    what = ", ".join(f"{fmt.words(alert.kind)} since step {fmt.step(alert.onset_step)}" for alert in collapse)
    return f"{what}: {REFUSED[kind]}"


def may_send(run: RunInfo, kind: str, typed: str) -> bool:
    """Return True if the run is live and, for a command that needs it, the text ``typed`` is the run's name or id."""
    return run.state is RunState.RUNNING and (not FORMS[kind].typed or " ".join(typed.split()) == confirmation(run))


def impossible(run: RunInfo, who: Principal) -> str:
    """Return the reason that ``who`` cannot send a command to the run now; empty if they can.

    A collapse is no such reason, since the command can be forced, and the dialog explains how.
    """
    if not who.may_command:
        return layout.LOOK_ONLY
    if run.state is not RunState.RUNNING:
        return f"The run has {run.state.value}: no trainer will run the command"
    if dead_since(run, time.time()) is not None:
        return "The trainer is dead: no command reaches it until it is restarted"
    return ""


def confirmation(run: RunInfo) -> str:
    """Return the text that the user must type to confirm a command: the run's name on one line, or its id."""
    name = " ".join(run.name.split())
    return name if 0 < len(name) <= TYPEABLE else run.run_id


def send(
    store: CommandStore,
    run_id: str,
    kind: str,
    args: Mapping[str, JSON],
    *,
    why: str,
    by: Principal,
    force: bool,
    key: str,
    clock: Clock | None = None,
) -> Command:
    """Queue a command for a run; a second call with an equal ``key`` returns the first command.

    ``why``: the user's reason. ``force``: overrule a veto of the trainer. Raises ``NotPermittedError`` unless ``by`` is
    an operator, ``ConfigError`` for arguments that are not allowed, ``ControlUnavailableError`` and ``StoreBusyError``.
    """
    by.require_command()
    return request(
        store,
        run_id,
        kind,
        args=args,
        why=why.strip(),
        by=by.name,
        force=force and COMMAND_KINDS[kind].vetoed,
        idempotency_key=key,
        clock=clock,
    )


def cancel_command(store: CommandStore, run_id: str, command_id: str, *, by: Principal) -> Command:
    """Cancel a queued command that no trainer has started, and return its new state.

    Raises ``NotPermittedError`` unless ``by`` is an operator, ``ControlUnavailableError`` and ``StoreBusyError``.
    """
    by.require_command()
    return cancel(store, run_id, command_id, by=by.name)


def reset_due(alerts: Sequence[Alert]) -> bool:
    """Return True if a reset of the reference is due: KL saturated or held-out scores stalled, without a collapse."""
    due = ("kl_saturation", "reset_due")
    saturated = any(alert.state is AlertState.FIRING and alert.kind in due for alert in alerts)
    return saturated and not collapsing(alerts)


def missed(command: Command, now: float) -> bool:
    """Return True if the command expired before a trainer took it; the store records this only later."""
    return command.status is CommandStatus.QUEUED and 0 < command.expires_at <= now


def waiting(commands: Sequence[Command], now: float) -> bool:
    """Return True if any of ``commands`` has no outcome yet."""
    return any(command.status.open and not missed(command, now) for command in commands)


def outcome(command: Command, now: float) -> str:
    """Return the status of a command in words, as ``done at step 4 816``."""
    if missed(command, now) or (command.status is CommandStatus.EXPIRED and command.claimed_at is None):
        return "expired: no trainer took it"
    at = "" if command.finished_step is None else f" at step {fmt.step(command.finished_step)}"
    return f"{command.status.value}{at}"


def arguments(command: Command) -> str:
    """Return the arguments of a command in short, without those left empty or at a choice's default."""
    kind = COMMAND_KINDS.get(command.kind)
    usual = {name for name, one in (kind.args if kind else {}).items() if _is_usual(one, command.args.get(name))}
    shown = {name: value for name, value in command.args.items() if value is not None and name not in usual}
    given = [f"{name} {_worded(value)}" for name, value in shown.items()]
    return ", ".join([*given, *(["forced"] if command.force else [])])


def _is_usual(argument: Argument, value: JSON) -> bool:
    return isinstance(argument, Choice) and argument.values == ("no", "yes") and value == argument.default


def _worded(value: JSON) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# The dialog that sends a command to a live run.

COMMAND_PENDING = "command-pending"
"""Session key of ``(run id, kind, idempotency key)`` while the command dialog is open."""

CHECK_LOOK = {True: ("✓", BLUE), None: ("◌", GREY), False: ("▲", AMBER)}


def open_dialog(run_id: str, kind: str) -> None:
    """Open the dialog that sends the command ``kind`` to a run, with a new idempotency key."""
    st.session_state[COMMAND_PENDING] = (run_id, kind, new_key())


def open_chosen(run_id: str, menu_key: str) -> None:
    """Open the dialog for the command that was chosen in the menu with the widget key ``menu_key``."""
    kind = str(st.session_state.get(menu_key))
    if kind in FORMS:
        open_dialog(run_id, kind)


def close() -> None:
    """Close the command dialog."""
    st.session_state.pop(COMMAND_PENDING, None)


def dialog_if_open(run: RunInfo) -> None:
    """Draw the command dialog if it is open for this run. Its state is in the session, so a rerun does not close it."""
    run_id, kind, key = st.session_state.get(COMMAND_PENDING, ("", "", ""))
    if run_id == run.run_id:
        st.dialog(FORMS[kind].title, width="medium", on_dismiss=close)(_dialog)(run, FORMS[kind], key)


def _dialog(run: RunInfo, form: CommandForm, key: str) -> None:
    st.markdown(form.explanation)
    st.html(joined(*(_check(check) for check in _checks(run, form.kind))))
    args = _arguments(form)
    why = st.text_input("Why", key="why", max_chars=300, placeholder="stored with the command")
    force = COMMAND_KINDS[form.kind].vetoed and st.checkbox("Force, even during a collapse", key="force")
    typed = st.text_input(f"Type {_quoted(run)} to confirm", key="typed", live=True) if form.typed else ""
    layout.signature()
    send, cancel = st.columns([1, 1])
    ready = may_send(run, form.kind, typed or "")
    if send.button("Send", type="primary", disabled=not ready, key="send", width="stretch"):
        _send(run, form, key, args, why=why or "", force=bool(force))
    if cancel.button("Cancel", key="cancel", width="stretch"):
        close()
        st.rerun()


def _arguments(form: CommandForm) -> dict[str, JSON]:
    """Draw a widget for each argument of the kind and return their values, without the empty ones."""
    args: dict[str, JSON] = {}
    for name, argument in COMMAND_KINDS[form.kind].args.items():
        label, key = form.labels.get(name, name), f"arg-{name}"
        if isinstance(argument, Choice):
            args[name] = st.radio(label, argument.values, format_func=lambda v: form.values.get(v, v), key=key)
        elif isinstance(argument, Number):
            args[name] = _number(form, name, argument, label, key)
        else:
            least = 0 if isinstance(argument, SnapshotChoice) else 1
            args[name] = st.number_input(label, min_value=least, value=None, step=1, key=key)
    return {name: value for name, value in args.items() if value is not None}


def _number(form: CommandForm, name: str, argument: Number, label: str, key: str) -> float | None:
    default = argument.default if isinstance(argument.default, float) else form.suggested.get(name)
    high = argument.high if argument.high < 1e6 else None
    if argument.whole:
        whole = None if default is None else int(default)
        least, most = int(argument.low), None if high is None else int(high)
        return st.number_input(label, min_value=least, max_value=most, value=whole, step=1, key=key)
    return st.number_input(label, min_value=argument.low, max_value=high, value=default, format="%g", key=key)


def _quoted(run: RunInfo) -> str:
    """Return the confirmation text for a label, with Markdown escaped."""
    return "".join(f"\\{c}" if not c.isalnum() and c.isascii() and not c.isspace() else c for c in confirmation(run))


def _checks(run: RunInfo, kind: str) -> list[Precondition]:
    alerts, vitals, now = queries.alerts(run.run_id), queries.vitals(run), time.time()
    stale, dead = silent_for(run, vitals.pace, now) is not None, dead_since(run, now) is not None
    names = queries.canonical_names(queries.metric_names(run), run.source)
    has_reference = True if any(name.startswith("policy/kl_ref") for name in names) else None
    paused = health.pause_of(run, queries.commands(run.run_id), now) is not None
    found = checks(kind, run, alerts, stale=stale, has_reference=has_reference, paused=paused, dead=dead)
    return [*found, *_now(run, kind, names)]


def _now(run: RunInfo, kind: str, names: Mapping[str, str]) -> list[Precondition]:
    """Return the current value of the quantity that the command changes, if it is recorded."""
    canonical, words = {
        "lower-lr": ("optim/lr", "current learning rate:"),
        "set-kl-coef": ("policy/kl_coef", "current KL coefficient:"),
    }.get(kind, ("", ""))
    last = queries.last_values(run.run_id).get(names.get(canonical, ""))
    if last is None:
        return []
    step, value = last
    return [Precondition(True, f"{words} {fmt.number(value)} (step {fmt.step(step)})")]


def _check(check: Precondition) -> Markup:
    shape, colour = CHECK_LOOK[check.met]
    mark = el("span", shape, style=f"color:{colour};flex:0 0 1.4em")
    return el("div", mark, el("span", check.text), style="display:flex")


def _send(run: RunInfo, form: CommandForm, key: str, args: dict[str, JSON], *, why: str, force: bool) -> None:
    by = layout.principal()
    try:
        sent = send(queries.store(), run.run_id, form.kind, args, why=why, by=by, force=force, key=key)
    except RLWatchError as error:
        st.error("The command was not sent.")
        st.code(fmt.shorten(str(error), 600), language=None, wrap_lines=True)
        return
    close()
    st.toast(f"Queued: {sent.kind}", icon=":material/schedule_send:")
    st.rerun()
