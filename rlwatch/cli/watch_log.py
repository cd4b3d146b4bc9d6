"""``rlwatch watch`` of a log: read what is there, then what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlwatch.cli.config_file import alerting_of
from rlwatch.cli.console import say
from rlwatch.cli.delivery import deliver_once, delivering
from rlwatch.cli.ending import unbroken
from rlwatch.cli.importing import holds
from rlwatch.cli.log_run import Log
from rlwatch.cli.news import tell_outcome
from rlwatch.cli.recording import Recording
from rlwatch.cli.stores import opened
from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, LogTail, read_log
from rlwatch.ports import Store
from rlwatch.records import AlertState, Severity, StepRecord
from rlwatch.run.alerting import Alerting


def scan_once(log: Log, store_url: str | None, config: Path | None) -> int:
    """Record and judge the log as it stands, deliver, and answer 1 if anything in it was critical."""
    imported = _only(read_log(log.path, run=log.run, format=log.read_as), log)
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        recording = _recording(log, imported.name, imported.source, store, alerting)
        recording.take(imported.records)
        recording.finish("the log was read to its end")
        delivered = deliver_once(store, alerting)
        code = int(ever_critical(store, recording.run.run_id))
    say(f"run {recording.run.run_id}: {recording.records} new records{f'; alerts {delivered}' if delivered else ''}")
    return code


def follow(
    log: Log,
    store_url: str | None,
    config: Path | None,
    pause: Callable[[], None],
    now: Callable[[], float] = time.time,
) -> None:
    """Record and judge the log as it grows, until ``pause`` raises ``KeyboardInterrupt``."""
    tail = LogTail(log.path, run=log.run, format=log.read_as)
    recording: Recording | None = None
    caught_up = False
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        with delivering(store, alerting):
            say(f"watching {log.path}; Ctrl-C stops", style="dim")
            try:
                while True:
                    records = _stamped(tail.poll(), now() if caught_up else 0.0)
                    if recording is None and records:
                        with unbroken():
                            recording = _recording(log, tail.name, tail.source, store, alerting)
                        say(f"run {recording.run.run_id} ({tail.format})", style="dim")
                    if recording is not None:
                        recording.take(records)
                        recording.tick()
                    caught_up = True
                    pause()
            except KeyboardInterrupt:
                say("stopped", style="dim")
            finally:
                if recording is not None:
                    recording.take(tail.close())
                    recording.finish("the watch ended")


def ever_critical(store: Store, run_id: str) -> bool:
    """Whether a critical alert of the run ever fired: what ``rlwatch scan`` answers 1 to."""
    return any(
        alert.severity is Severity.CRITICAL and alert.state is not AlertState.PENDING for alert in store.alerts(run_id)
    )


def _recording(log: Log, name: str, source: str, store: Store, alerting: Alerting) -> Recording:
    info = log.info(name, source, time.time())
    if holds(store, info.run_id):
        info = replace(info, name=log.name)  # without a new one it keeps the name it has
    return Recording(store, info, policy=alerting.policy, dashboard_url=alerting.dashboard_url, on_outcome=tell_outcome)


def _stamped(records: Sequence[StepRecord], now: float) -> list[StepRecord]:
    """Rows that came while we looked came now; of those that were there before nobody knows when."""
    return [record if record.ts else replace(record, ts=now) for record in records]


def _only(runs: list[ImportedRun], log: Log) -> ImportedRun:
    if len(runs) != 1:
        names = ", ".join(repr(run.name) for run in runs[:10])
        raise ImportFormatError(str(log.path), f"holds {len(runs)} runs; choose one with --run: {names}")
    return runs[0]
