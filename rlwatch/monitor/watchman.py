"""The watchman monitors the runs of a store from another process: heartbeats, unjudged rows, messages due by time.

A run that fell silent or died cannot report it, so the processes that watch the store do. An alert's id is derived from
the last row the run wrote, so that all of them raise the same alert; only its time differs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.engine import alert_id
from rlwatch.alerts.rules import CRASHED, HEARTBEAT_KINDS, SILENT, AlertingConfig, Rule
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.liveness import LivenessSigns, sign_of, stack_of, stage_words
from rlwatch.error_boundary import described, log_message, run_forever, sheltered
from rlwatch.errors import RLWatchError, StoreError
from rlwatch.monitor.judge import judge_rest
from rlwatch.ports import Store
from rlwatch.records import JSON, Alert, AlertState, Event, RunInfo, RunState, Severity

RECENT_S = 24 * 3600.0
"""Seconds: a run that had been silent for longer when it is first seen raises no alert."""


STALLS_NAMED = 4
"""Largest number of stalled ranks that an alert names."""
FRAMES_SENT = 12
"""Number of stack frames of each stalled rank that an alert includes."""


def heartbeat_alerts(run: RunInfo, sign: LivenessSigns, alerts: Iterable[Alert], rule: Rule, now: float) -> list[Alert]:
    """Return the alerts of the heartbeat ``rule`` on ``run`` that began, worsened or ended at ``now`` (Unix seconds).

    ``sign``: signs of life of the run. ``alerts``: its stored alerts, with which the present state is compared.
    """
    known = {alert.alert_id: alert for alert in alerts if alert.rule == rule.name and alert.kind in HEARTBEAT_KINDS}
    current = _raised(run, sign, rule, now)
    firing = [alert for alert in known.values() if alert.state is AlertState.FIRING]
    over = [_over(alert, run, sign, now) for alert in firing if _ended(alert, current, run, sign)]
    if current is None:
        return over
    before = known.get(current.alert_id)
    if before is None:
        recent = now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < RECENT_S
        return [*over, current] if recent else over
    worse = before.state is AlertState.FIRING and current.severity.rank > before.severity.rank
    return [*over, replace(current, fired_at=before.fired_at)] if worse else over


def _raised(run: RunInfo, sign: LivenessSigns, rule: Rule, now: float) -> Alert | None:
    """Return the heartbeat alert that holds now, if any."""
    if run.state is RunState.CRASHED:
        kind, severity, message = CRASHED, Severity.CRITICAL, run.state_reason or "the trainer ended with an error"
    elif sign.silent_s is not None:
        kind, severity, message = SILENT, _silence_severity(sign), _silence_words(run, sign, now)
    else:
        return None
    if (rule.kinds and kind not in rule.kinds) or severity.rank < rule.min_severity.rank:
        return None
    step = run.last_step or 0
    return Alert(
        alert_id=alert_id(run.run_id, rule.name, kind, sign.pace.seq),
        run_id=run.run_id,
        rule=rule.name,
        kind=kind,
        severity=rule.severity or severity,
        state=AlertState.FIRING,
        onset_step=step,
        step=step,
        message=message,
        reason=f"{message}; judged from the store",
        detector="heartbeat",
        evidence=_evidence(run, sign),
        fired_at=now,
    )


def _ended(alert: Alert, current: Alert | None, run: RunInfo, sign: LivenessSigns) -> bool:
    """Return whether the run reported again, or its writer recorded its end."""
    if current is not None:
        return alert.alert_id != current.alert_id
    spoke = alert.alert_id != alert_id(alert.run_id, alert.rule, alert.kind, sign.pace.seq)
    return spoke or run.state in (RunState.FINISHED, RunState.UNFINISHED)


def _over(alert: Alert, run: RunInfo, sign: LivenessSigns, now: float) -> Alert:
    words = {
        RunState.FINISHED: f"the run has finished{f': {run.state_reason}' if run.state_reason else ''}",
        RunState.CRASHED: "the run has ended with an error",
        RunState.UNFINISHED: run.state_reason or "its log stops",
        RunState.RUNNING: f"the run reports again: step {run.last_step}, attempt {max(run.attempt, sign.pace.attempt)}",
    }
    return replace(
        alert,
        state=AlertState.RESOLVED,
        step=run.last_step or 0,
        reason=words[run.state],
        resolved_step=run.last_step or 0,
        resolved_at=now,
    )


def _silence_severity(sign: LivenessSigns) -> Severity:
    return Severity.WARNING if sign.reports else Severity.CRITICAL


def _silence_words(run: RunInfo, sign: LivenessSigns, now: float) -> str:
    usual = "" if sign.pace.step_s is None else f" (usually {duration(sign.pace.step_s)})"
    silence = f"no step for {duration(sign.silent_s or 0.0)}{usual}"
    if sign.reports:
        where = "; ".join(str(event.body.get("says", "")) for event in sign.stalls[:STALLS_NAMED])
        where = where or stage_words(run, now) or "it hangs, or does something that takes long"
        return f"{silence}; its process lives: {where}"
    last = max(run.heartbeat_at or 0.0, run.last_ts or 0.0, run.created_at)
    ended = f"it was killed, or its machine is gone{f'; it was in stage {run.stage}' if run.stage else ''}"
    return f"{silence}, and no sign of its process for {duration(now - last)}: {ended}"


def _evidence(run: RunInfo, sign: LivenessSigns) -> dict[str, JSON]:
    found = {
        "silent_s": sign.silent_s,
        "median_step_s": sign.pace.step_s,
        "last_step": run.last_step,
        "last_step_at": run.last_ts,
        "heartbeat_at": run.heartbeat_at,
        "host": run.host or None,
        "pid": run.pid,
        "stage": run.stage or None,
        "stage_since": run.stage_since,
        "stalls": [_stall(event) for event in sign.stalls[:STALLS_NAMED]] or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _stall(event: Event) -> dict[str, JSON]:
    """Return the part of a stall that fits a message: the innermost frames of the training thread."""
    kept = {name: event.body.get(name) for name in ("rank", "stage", "since", "what")}
    return {**kept, "stack": list[JSON](stack_of(event, FRAMES_SENT))}


def duration(seconds: float) -> str:
    """Return a number of seconds as text: ``38 s``, ``41 min``, ``3.5 h``.

    >>> [duration(s) for s in (0.25, 38, 2460, 12600)]
    ['0.25 s', '38 s', '41 min', '3.5 h']
    """
    for unit, length, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0)):
        if seconds < most:
            return f"{seconds / length:.2g} {unit}" if seconds < 100 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.3g} h"


logger = logging.getLogger("rlwatch")

LOOK_S = 10.0
"""Seconds between two checks of the store."""

OVER_S = 7 * 24 * 3600.0
"""Seconds without a sign of life after which a run is no longer checked."""


class Watchman:
    """Checks whether the runs of a store are alive, judges rows that dead processes left, and publishes due messages.

    Parameters
    ----------
    store
        The store.
    policy
        Alert rules and their settings.
    dashboard_url
        Address of the dashboard, for links in messages; empty: none.
    run_id
        The only run to check; None: all.
    clock
        Clock; None: the machine's.
    """

    def __init__(
        self,
        store: Store,
        policy: AlertingConfig,
        *,
        dashboard_url: str = "",
        run_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.failures = 0
        """Number of times that a run could not be checked."""
        self._store = store
        self._run_id = run_id
        self._policy = policy
        self._judged: dict[str, object] = {}
        self._rules = [rule for rule in policy.rules if _is_about_heartbeats(rule)]
        self._clock = clock or SystemClock()
        self._dispatcher = Dispatcher(store, policy, dashboard_url=dashboard_url, clock=self._clock, live=self._lives)

    def look(self) -> int:
        """Check all runs once; return the number of messages that were written to the outbox."""
        written = 0
        for run in self._runs():
            try:
                written += self._look_after(run)
            except StoreError as error:  # busy or damaged: the others must not wait for it
                self._count(run, error)
        return written

    def _look_after(self, run: RunInfo) -> int:
        self._judge_rest(run)
        now = self._clock.now()
        stored = self._store.alerts(run.run_id)
        if run.state is RunState.FINISHED and not stored:
            return 0  # most of a store
        sign = sign_of(self._store, run, now)
        raised = [alert for rule in self._rules for alert in heartbeat_alerts(run, sign, stored, rule, now)]
        return len(self._dispatcher.publish(run.run_id, raised)) if stored or raised else 0

    def _judge_rest(self, run: RunInfo) -> None:
        """Judge the rows that a dead process left; skip a run that has not changed since it was fully judged."""
        version = (run.attempt, run.last_step, run.last_ts, run.heartbeat_at, run.state)
        if self._judged.get(run.run_id) == version:
            return
        if judge_rest(self._store, run.run_id, self._policy, self._dispatcher):
            logger.info("run %s: judged what its process had stored and not judged", run.run_id)
        done, last = self._store.judged(run.run_id)
        if done >= last:
            self._judged[run.run_id] = version

    def _runs(self) -> Iterator[RunInfo]:
        now = self._clock.now()
        for run in [self._store.run(self._run_id)] if self._run_id else self._store.runs():
            if now - max(run.last_ts or 0.0, run.heartbeat_at or 0.0, run.created_at) < OVER_S:
                yield run

    def _lives(self, run: RunInfo) -> bool:
        if run.state is not RunState.RUNNING:
            return False
        return sign_of(self._store, run, self._clock.now()).silent_s is None

    def _count(self, run: RunInfo, error: RLWatchError) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("cannot look after run %s: %s; further failures are only counted", run.run_id, error)


class WatchmanThread:
    """Thread that runs a watchman at intervals until it is stopped; a daemon, so it does not keep a process alive.

    ``every_s``: seconds between two checks.
    """

    def __init__(self, watchman: Watchman, *, every_s: float = LOOK_S) -> None:
        self.looks = 0
        """Number of checks of the store so far."""
        self.failures = 0
        """Number of checks that failed as a whole."""
        self._watchman = watchman
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=run_forever, args=(self._work, self._failed), name="rlwatch-watchman", daemon=True
        )

    def start(self) -> None:
        """Start the thread that runs the watchman."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread that runs the watchman is alive."""
        return self._thread.is_alive()

    def stop(self, deadline_s: float = 5.0) -> bool:
        """Stop after the current check; return False if that took longer than ``deadline_s`` seconds."""
        self._stop.set()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while not self._stop.is_set():
            sheltered(self._watchman.look, self._failed)  # a check that fails must not be the last
            self.looks += 1
            self._stop.wait(self._every_s)

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            log_message(
                logging.WARNING, "cannot look after the store: %s; further failures are only counted", described(error)
            )


def _is_about_heartbeats(rule: Rule) -> bool:
    return bool(set(rule.kinds) & set(HEARTBEAT_KINDS))
