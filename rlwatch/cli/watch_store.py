"""``rlwatch watch`` of a store: judge whether runs live, deliver what waits, tell what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.background import background_services, deliver_once, delivering, watchman
from rlwatch.cli.console import say, warn
from rlwatch.cli.options import alerting_of, opened
from rlwatch.cli.view_text import print_alert_line, print_finding_line
from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, Finding, RunInfo, Severity
from rlwatch.wording import one_line


class StoreWatch:
    """Remembers what was told, of all runs or of one."""

    def __init__(self, store: Store, run_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id
        self._versions: dict[str, object] = {}
        self._findings: dict[str, int] = {}
        self._alerts: dict[str, tuple[AlertState, Severity]] = {}

    def findings(self) -> Iterator[tuple[RunInfo, Finding]]:
        """Findings stored since the last call. A run that has not moved is not read again."""
        for run in self._runs():
            version = (run.attempt, run.last_step, run.last_ts, run.heartbeat_at, run.state)
            if self._versions.get(run.run_id) == version:
                continue
            with suppress(StoreError):  # unreadable at this moment: the next look will tell
                found = self._store.findings(run.run_id)
                reported = self._findings.get(run.run_id, 0)
                self._versions[run.run_id], self._findings[run.run_id] = version, len(found)
                yield from ((run, finding) for finding in found[reported:])

    def alerts(self) -> Iterator[Alert]:
        """Alerts that fired, got worse or were resolved since the last call, oldest first."""
        for alert in reversed(self._store.alerts(self._run_id)):
            now = (alert.state, alert.severity)
            if alert.state is not AlertState.PENDING and self._alerts.get(alert.alert_id) != now:
                self._alerts[alert.alert_id] = now
                yield alert

    def critical(self) -> bool:
        """True if a critical alert is firing now."""
        return any(
            alert.state is AlertState.FIRING and alert.severity is Severity.CRITICAL
            for alert in self._store.alerts(self._run_id)
        )

    def _runs(self) -> list[RunInfo]:
        return [self._store.run(self._run_id)] if self._run_id else self._store.runs()


def look_once(url: str | None, run: str | None, config: Path | None) -> int:
    """Tell everything, deliver what is due, and answer 1 if a critical alert is firing."""
    with opened(url) as store:
        run_id, alerting = None if run is None else find_run(store, run).run_id, alerting_of(config, store)
        _require_a_run(store)
        watch = StoreWatch(store, run_id)
        watchman(store, alerting, run_id).look()
        _tell(watch)
        delivered = deliver_once(store, alerting)
        if delivered:
            say(f"alerts {delivered}")
        return int(watch.critical())


def follow(
    url: str | None, run: str | None, config: Path | None, pause: Callable[[], None], pushed_s: float = 1.0
) -> None:
    """Deliver, and tell what comes from now on, until ``pause`` raises ``KeyboardInterrupt``.

    Where the store pushes news, they are waited for instead, at most ``pushed_s``.
    """
    with opened(url) as store:
        run_id, alerting = None if run is None else find_run(store, run).run_id, alerting_of(config, store)
        watch = StoreWatch(store, run_id)
        old = len(list(watch.findings())) + len(list(watch.alerts()))
        with delivering(store, alerting), background_services(store, alerting, run_id):
            say(f"watching {store.url} (older findings and alerts not shown: {old}); stop with Ctrl-C", style="dim")
            news = store.news("alerts", run_id)
            try:
                while True:
                    if news is None:
                        pause()
                    else:
                        news.arrived(pushed_s)
                    _tell(watch)
            except KeyboardInterrupt:
                say("stopped", style="dim")
            finally:
                if news is not None:
                    news.close()


def _require_a_run(store: Store) -> None:
    """Say which runs cannot be read. Raises ``RunNotFoundError`` if none can: a check must not pass on nothing."""
    for name, reason in store.unreadable().items():
        warn(one_line(f"{name}: cannot be read: {reason}", 300))
    if not store.runs():
        raise RunNotFoundError(f"{store.url} holds no run that can be read")


def _tell(watch: StoreWatch) -> None:
    for run, finding in watch.findings():
        print_finding_line(finding, f"{run.name or run.run_id}  ")
    for alert in watch.alerts():
        print_alert_line(alert, f"{alert.run_id}  ")
