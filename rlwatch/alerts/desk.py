"""Where alerts are put down and what is to be told of them is written: the one door to a store's outbox.

Trainers, ``rlwatch watch`` and the dashboard each have one; they share no memory. Whoever comes first writes,
in one transaction with reading what was written before, so that no two say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from rlwatch.alerts.plan import Plan, Scene, plan
from rlwatch.alerts.policy import GroupBy, Policy
from rlwatch.alerts.rules import Rule
from rlwatch.clock import Clock, SystemClock
from rlwatch.diagnosis import Cause, Sureness, diagnose
from rlwatch.errors import StoreError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, Ledger, OutboxMessage, RunInfo

CONSOLE = "console"
"""Not written: a process logs its own alerts, at once."""


class Desk:
    """Tells the alerts of a store's runs.

    Parameters
    ----------
    policy
        Rules and what applies to all of them. Alerts of other rules are left to processes that have these.
    dashboard_url
        What messages link to.
    live
        Whether a run goes on; a run's own trainer says yes.
    console
        Whether messages are written for the channel ``console``, too.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        dashboard_url: str = "",
        clock: Clock | None = None,
        live: Callable[[RunInfo], bool] = lambda _: True,
        console: bool = False,
    ) -> None:
        self.kept: Plan = Plan()
        """The last plan: what it wrote and what it kept back."""
        self._store = store
        self._policy = policy if console else replace(policy, rules=tuple(map(_without_console, policy.rules)))
        self._dashboard_url = dashboard_url
        self._clock = clock or SystemClock()
        self._live = live

    def tell(self, run_id: str, alerts: Sequence[Alert] = (), *, last_word: bool = False) -> list[OutboxMessage]:
        """Put the alerts down and write what is due on their run; returns the messages that are new.

        With ``last_word`` nothing waits for others of its group. May raise ``StoreBusyError``: nothing, or
        only the alerts, was stored then, and the same call may be made again.
        """
        if self._policy.grouping.by is GroupBy.PROJECT:
            if alerts:
                self._store.put_alerts(alerts, [])
            return self._tell_project(run_id, last_word=last_word)
        scene = self._scene([_as_of(self._store.run(run_id), alerts)], last_word=last_word)
        for alert in alerts:
            if alert.state is AlertState.FIRING:  # read what will be wanted before the control file is locked
                scene.cause(run_id, alert.kind, alert.step)
        if not alerts and not self._planned(self._store.ledger(run_id), scene).messages:
            return []  # the usual look takes no lock
        return self._store.tell(run_id, alerts, lambda ledger: self._planned(ledger, scene).messages)

    def _tell_project(self, run_id: str, *, last_word: bool) -> list[OutboxMessage]:
        """One message may tell alerts of several runs, so that one process at a time plans for the project."""
        project = self._store.run(run_id).project
        runs = [run for run in self._store.runs() if run.project == project]
        scene = self._scene(runs, last_word=last_word)
        if not self._planned(self._whole(runs), scene).messages:
            return []
        with self._store.exclusive():
            messages = self._planned(self._whole(runs), scene).messages
            self._store.put_alerts([], messages)
        return list(messages)

    def _planned(self, ledger: Ledger, scene: Scene) -> Plan:
        self.kept = plan(ledger, self._policy, scene, self._dashboard_url)
        return self.kept

    def _scene(self, runs: Sequence[RunInfo], *, last_word: bool) -> Scene:
        live = frozenset(run.run_id for run in runs if self._live(run))
        by_id = {run.run_id: run for run in runs}
        silences = self._store.silences()
        return Scene(
            self._clock.now(), by_id, live, silences, last_word=last_word, cause=cache(partial(self._cause, by_id))
        )

    def _cause(self, runs: Mapping[str, RunInfo], run_id: str, kind: str, at: int | None) -> Cause | None:
        """The likeliest cause of failures of this kind, where more than the failure itself is known of it."""
        try:
            findings, events = self._store.findings(run_id), self._store.events(run_id)
        except StoreError:
            return None  # the alert goes out without
        said = diagnose(findings, events=events, source=runs[run_id].source, at=at)
        sure = (cause for cause in said.causes if cause.sure is not Sureness.WEAK and cause.symptoms)
        return next((cause for cause in sure if kind in (cause.kind, *cause.symptoms)), None)

    def _whole(self, runs: Sequence[RunInfo]) -> Ledger:
        """The ledgers of all runs that can be read, as one."""
        whole = Ledger()
        for run in runs:
            try:
                part = self._store.ledger(run.run_id)
            except StoreError:
                continue  # damaged, or busy: its alerts wait for the next look
            whole = Ledger(
                whole.alerts + part.alerts,
                whole.messages + part.messages,
                whole.acknowledgements + part.acknowledgements,
            )
        return whole


def _as_of(run: RunInfo, alerts: Sequence[Alert]) -> RunInfo:
    """The run at the step of the alerts: a batch of rows is stored whole and judged step by step."""
    step = max((alert.step for alert in alerts), default=None)
    return run if step is None or step >= (run.last_step or 0) else replace(run, last_step=step)


def _without_console(rule: Rule) -> Rule:
    channels, others = (tuple(c for c in names if c != CONSOLE) for names in (rule.channels, rule.escalate_to))
    if others or rule.escalate_severity is not None:
        return replace(rule, channels=channels, escalate_to=others)
    return replace(rule, channels=channels, escalate_to=(), escalate_after_minutes=0.0, escalate_after_steps=0)
