"""Looks after the runs of a store from outside: heartbeats, and whatever time alone makes due to be told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from rlwatch.alerts.dispatch import Dispatcher
from rlwatch.alerts.rules import HEARTBEAT_KINDS, Policy, Rule
from rlwatch.clock import Clock, SystemClock
from rlwatch.control.liveness import sign_of
from rlwatch.errors import RLWatchError, StoreError
from rlwatch.monitor.heartbeat import judged
from rlwatch.monitor.judge import judge_rest
from rlwatch.ports import Store
from rlwatch.records import RunInfo, RunState
from rlwatch.seam import described, say, tireless

logger = logging.getLogger("rlwatch")

LOOK_S = 10.0
"""Seconds between two looks."""

OVER_S = 7 * 24 * 3600.0
"""A run without a sign of life for so long is not looked after any more."""


class Watchman:
    """Judges whether the store's runs live and tells what is due.

    Parameters
    ----------
    run_id
        The only run to look after; None: all.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        dashboard_url: str = "",
        run_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.failures = 0
        """Runs that could not be looked after, each time counted."""
        self._store = store
        self._run_id = run_id
        self._policy = policy
        self._judged: dict[str, object] = {}
        self._rules = [rule for rule in policy.rules if _is_about_heartbeats(rule)]
        self._clock = clock or SystemClock()
        self._dispatcher = Dispatcher(store, policy, dashboard_url=dashboard_url, clock=self._clock, live=self._lives)

    def look(self) -> int:
        """Look once; returns how many messages were written."""
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
        raised = [alert for rule in self._rules for alert in judged(run, sign, stored, rule, now)]
        return len(self._dispatcher.publish(run.run_id, raised)) if stored or raised else 0

    def _judge_rest(self, run: RunInfo) -> None:
        """Judge what a dead process left; a run that has not moved since it was seen to be judged is passed over."""
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
    """A watchman who looks every ten seconds until stopped. A daemon: it does not keep a process alive."""

    def __init__(self, watchman: Watchman, *, every_s: float = LOOK_S) -> None:
        self.failures = 0
        """Looks that failed as a whole."""
        self._watchman = watchman
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=tireless, args=(self._work, self._failed), name="rlwatch-watchman", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """End, after the look that may be going on."""
        self._stop.set()
        self._thread.join(deadline_s)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._watchman.look()
            except BaseException as error:  # noqa: BLE001  (seam: a look that fails must not be the last)
                self._failed(error)
            self._stop.wait(self._every_s)

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            say(logging.WARNING, "cannot look after the store: %s; further failures are only counted", described(error))


def _is_about_heartbeats(rule: Rule) -> bool:
    return bool(set(rule.kinds) & set(HEARTBEAT_KINDS))
