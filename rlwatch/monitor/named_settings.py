"""Settings that changed during a run and that the diagnosis names as causes, for the policy that saves it.

A rollback makes detectors and diagnosis forget the rows that it undid, and with them when a setting changed. So a
setting that was named stays named until no alert of a collapse fires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlwatch import catalogue
from rlwatch.control.policy import COLLAPSE_KINDS, KL_COEF, NamedSetting
from rlwatch.diagnosis.diagnose import Cause, Confidence
from rlwatch.diagnosis.turns import ChangeSource
from rlwatch.monitor.step_judge import Lookback
from rlwatch.records import COMMAND, Alert, Event, Severity

SETTINGS = frozenset({"optim/lr", KL_COEF, "policy/entropy_coef", "policy/clip_range", "rollout/temperature"})
"""Metrics that are a setting of the update or of sampling."""
EVERY = 5
"""Steps between two diagnoses while an alert fires."""
COMMANDED = 2
"""Steps between a command and a change of its setting within which the command made the change."""
DIGITS = 12
"""Significant digits of a value before a change: it is known from its logarithm."""


class NamedSettings:
    """Keeps the changed settings that the diagnosis names as causes, while critical alerts of a collapse fire."""

    def __init__(self) -> None:
        self._named: dict[str, NamedSetting] = {}
        self._step = 0
        self._kinds: frozenset[str] = frozenset()

    def now(self, alerts: Sequence[Alert], lookback: Lookback, source: str, step: int) -> tuple[NamedSetting, ...]:
        """Return the changed settings that the diagnosis names as causes; empty while no critical alert of a collapse
        fires.

        Parameters
        ----------
        alerts
            Alerts that fire.
        lookback
            Findings, events and steps of the run, from which the diagnosis is made.
        source
            The trainer, as in ``RunInfo.source``.
        step
            The step judged last.
        """
        kinds = frozenset(a.kind for a in alerts if a.severity is Severity.CRITICAL and a.kind in COLLAPSE_KINDS)
        if not kinds:
            self._named, self._kinds = {}, kinds
            return ()
        if kinds != self._kinds or step >= self._step + EVERY:
            self._kinds, self._step = kinds, step
            for cause in lookback.diagnosis(source).causes:
                found = named_by(cause, lookback.events, step)
                if found is not None:
                    self._named.setdefault(found.metric, found)
        return tuple(self._named.values())


def named_by(cause: Cause, events: Sequence[Event], step: int) -> NamedSetting | None:
    """Return the changed setting behind ``cause`` at ``step``, with its values before and after.

    None if the cause is no logged setting or uncertain, if the setting was changed back, or if one of ``events`` shows
    that a command changed it.
    """
    change = cause.change
    if change is None or change.source is not ChangeSource.LOGGED or change.name not in SETTINGS:
        return None
    before, after = change.before, change.at(step)
    if change.warming or change.until is not None or cause.sure is Confidence.WEAK:
        return None
    if isinstance(before, str) or isinstance(after, str) or not math.isfinite(before):
        return None
    commands = catalogue.knobs()[change.knob].commands
    ours = (event for event in events if event.kind == COMMAND and event.body.get("command") in commands)
    if any(event.step is not None and change.step - COMMANDED <= event.step <= change.step for event in ours):
        return None
    return NamedSetting(
        change.knob, change.name, change.step, float(f"{before:.{DIGITS}g}"), float(after), cause.sure.value
    )
