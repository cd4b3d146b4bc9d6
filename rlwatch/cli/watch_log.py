"""``rlwatch watch`` of a log: read what is there, then what comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlwatch.cli.config_file import alerting_of
from rlwatch.cli.console import errors, say
from rlwatch.cli.delivery import deliver_once, delivering
from rlwatch.cli.ending import unbroken
from rlwatch.cli.forecast_rows import print_forecast
from rlwatch.cli.importing import holds
from rlwatch.cli.log_run import Log
from rlwatch.cli.log_watch import LogWatch
from rlwatch.cli.news import tell_outcome
from rlwatch.cli.progress import backlog
from rlwatch.cli.recording import Recording
from rlwatch.cli.stores import opened
from rlwatch.cli.watch_position import Positions
from rlwatch.cli.wording import clean, one_line
from rlwatch.clock import Clock
from rlwatch.errors import ImportFormatError
from rlwatch.importers import ImportedRun, Tail, read_log
from rlwatch.ports import Store
from rlwatch.records import AlertState, Severity
from rlwatch.run.alerting import Alerting


def scan_once(log: Log, store_url: str | None, config: Path | None, tail: Tail | None = None) -> int:
    """Record and judge the log as it stands, deliver, and answer 1 if anything in it was critical."""
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        watch = watch_of(log, store, alerting, tail=tail)
        if tail is None and watch.is_new:
            _only(read_log(log.path, run=log.run, format=log.read_as), log)  # or why it cannot be watched
        while watch.look() or watch.behind:
            pass
        if watch.tail.problem and not watch.records:
            raise ImportFormatError(str(log.path), watch.tail.problem)
        if watch.left_out:
            say(f"left out: {watch.left_out}", style="dim")
        watch.end("the log was read to its end", whole=True)
        delivered = deliver_once(store, alerting)
        print_forecast(store.forecasts(watch.run_id))
        code = int(ever_critical(store, watch.run_id))
    say(f"run {watch.run_id}: {watch.records} new records{f'; alerts {delivered}' if delivered else ''}")
    return code


def follow(
    log: Log,
    store_url: str | None,
    config: Path | None,
    pause: Callable[[], None],
    clock: Clock | None = None,
    *,
    tail: Tail | None = None,
) -> None:
    """Record and judge the log as it grows, until ``pause`` raises ``KeyboardInterrupt``.

    Ctrl-C is heard between two looks only, so that it never breaks what a look has begun.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        with delivering(store, alerting):
            watch = watch_of(log, store, alerting, clock=clock, tail=tail)
            say(f"watching {log.path}; Ctrl-C stops", style="dim")
            try:
                with backlog(watch.tail) as shown:
                    catch_up(watch, shown)
                problem = ""
                while True:
                    problem = tell_problem(watch, problem)
                    pause()
                    catch_up(watch)
            except KeyboardInterrupt:
                say("stopped", style="dim")
            finally:
                with unbroken():
                    watch.end("the watch ended")


def catch_up(watch: LogWatch, shown: Callable[[], None] = lambda: None) -> None:
    """Take all there is, a lot at a time; Ctrl-C is heard, and ``shown`` is called, between two."""
    known = watch.recording is not None
    while True:
        with unbroken():
            watch.look()
        if watch.recording is not None and not known:
            known = True
            say(f"run {watch.run_id} ({watch.tail.format})", style="dim")
        shown()
        if not watch.behind:
            return


def tell_problem(watch: LogWatch, told: str) -> str:
    """Say on stderr why nothing can be read at the moment, unless that is what was ``told`` last; what it is."""
    problem = watch.tail.problem
    if problem and problem != told:
        errors().print(f"waiting: {clean(one_line(problem, 300))}", style="yellow", soft_wrap=True)
    return problem


def watch_of(
    log: Log,
    store: Store,
    alerting: Alerting,
    *,
    clock: Clock | None = None,
    tail: Tail | None = None,
    prefix: str = "",
) -> LogWatch:
    """The log on its way into the store, judged by ``alerting``; ``prefix`` goes before each line that is told."""

    def start(tail: Tail) -> Recording:
        return _recording(log, tail.name, tail.source, store, alerting, prefix=prefix)

    return LogWatch(log, Positions(store), start, tail=tail, clock=clock)


def ever_critical(store: Store, run_id: str) -> bool:
    """Whether a critical alert of the run ever fired: what ``rlwatch scan`` answers 1 to."""
    return any(
        alert.severity is Severity.CRITICAL and alert.state is not AlertState.PENDING for alert in store.alerts(run_id)
    )


def _recording(log: Log, name: str, source: str, store: Store, alerting: Alerting, *, prefix: str = "") -> Recording:
    info = log.info(name, source, time.time())
    if holds(store, info.run_id):
        info = replace(info, name=log.name)  # without a new one it keeps the name it has
    return Recording(
        store,
        info,
        policy=alerting.policy,
        dashboard_url=alerting.dashboard_url,
        on_outcome=partial(tell_outcome, prefix=prefix),
    )


def _only(runs: list[ImportedRun], log: Log) -> ImportedRun:
    if len(runs) != 1:
        names = ", ".join(repr(run.name) for run in runs[:10])
        raise ImportFormatError(str(log.path), f"holds {len(runs)} runs; choose one with --run: {names}")
    return runs[0]
