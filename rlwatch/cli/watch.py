"""``rlwatch watch SOURCE``: follow a growing log, all logs of a directory, a run of a tracker, or a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from rlwatch.analysis.lookup import find_run
from rlwatch.cli.background import background_services, deliver_once, delivering, sigterm_as_ctrl_c, watchman
from rlwatch.cli.console import print_text, warn
from rlwatch.cli.import_log import NamedLog
from rlwatch.cli.options import (
    ConfigOption,
    MapOption,
    PatternOption,
    ReadAsOption,
    RunOfLogOption,
    StoreOption,
    TrainerOption,
    alerting_of,
    examples,
    format_of,
    naming_of,
    no_log_either,
    opened,
)
from rlwatch.cli.view_text import print_alert_line, print_finding_line
from rlwatch.errors import ConfigError, ImportFormatError, RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, Finding, RunInfo, Severity
from rlwatch.wording import one_line

# ``rlwatch watch`` of a store: check whether runs are alive, deliver waiting messages, print news.


class StoreWatch:
    """Yields new findings and alerts of all runs of a store, or of one run, each once."""

    def __init__(self, store: Store, run_id: str | None = None) -> None:
        self._store = store
        self._run_id = run_id
        self._versions: dict[str, object] = {}
        self._findings: dict[str, int] = {}
        self._alerts: dict[str, tuple[AlertState, Severity]] = {}

    def findings(self) -> Iterator[tuple[RunInfo, Finding]]:
        """Yield the run and the finding for each finding stored since the last call; unchanged runs
        are not read again.
        """
        for run in self._runs():
            version = (run.attempt, run.last_step, run.last_ts, run.heartbeat_at, run.state)
            if self._versions.get(run.run_id) == version:
                continue
            with suppress(StoreError):  # unreadable now: the next check tries again
                found = self._store.findings(run.run_id)
                reported = self._findings.get(run.run_id, 0)
                self._versions[run.run_id], self._findings[run.run_id] = version, len(found)
                yield from ((run, finding) for finding in found[reported:])

    def alerts(self) -> Iterator[Alert]:
        """Yield the alerts that fired, worsened or were resolved since the last call, oldest first."""
        for alert in reversed(self._store.alerts(self._run_id)):
            now = (alert.state, alert.severity)
            if alert.state is not AlertState.PENDING and self._alerts.get(alert.alert_id) != now:
                self._alerts[alert.alert_id] = now
                yield alert

    def critical(self) -> bool:
        """Return whether a critical alert of the watched runs is firing now."""
        return any(
            alert.state is AlertState.FIRING and alert.severity is Severity.CRITICAL
            for alert in self._store.alerts(self._run_id)
        )

    def _runs(self) -> list[RunInfo]:
        return [self._store.run(self._run_id)] if self._run_id else self._store.runs()


def judge_store_once(url: str | None, run: str | None, config: Path | None) -> int:
    """Print all findings and alerts of a store's runs, send due messages, and return 1 if a critical alert is firing,
    else 0.

    ``run`` restricts this to one run; ``config`` is the configuration file.
    """
    with opened(url) as store:
        run_id, alerting = None if run is None else find_run(store, run).run_id, alerting_of(config, store)
        _require_a_run(store)
        watch = StoreWatch(store, run_id)
        watchman(store, alerting, run_id).look()
        _print_news(watch)
        delivered = deliver_once(store, alerting)
        if delivered:
            print_text(f"alerts {delivered}")
        return int(watch.critical())


def follow_store(
    url: str | None, run: str | None, config: Path | None, pause: Callable[[], None], pushed_s: float = 1.0
) -> None:
    """Send alert messages of a store and print new findings and alerts until ``pause`` raises ``KeyboardInterrupt``.

    If the store sends notifications, wait for them in place of ``pause``, at most ``pushed_s`` seconds each time.
    """
    with opened(url) as store:
        run_id, alerting = None if run is None else find_run(store, run).run_id, alerting_of(config, store)
        watch = StoreWatch(store, run_id)
        old = len(list(watch.findings())) + len(list(watch.alerts()))
        with delivering(store, alerting), background_services(store, alerting, run_id):
            print_text(
                f"watching {store.url} (older findings and alerts not shown: {old}); stop with Ctrl-C", style="dim"
            )
            news = store.news("alerts", run_id)
            try:
                while True:
                    if news is None:
                        pause()
                    else:
                        news.arrived(pushed_s)
                    _print_news(watch)
            except KeyboardInterrupt:
                print_text("stopped", style="dim")
            finally:
                if news is not None:
                    news.close()


def _require_a_run(store: Store) -> None:
    """Warn of runs that cannot be read. Raises ``RunNotFoundError`` if none can, so that a check does not pass."""
    for name, reason in store.unreadable().items():
        warn(one_line(f"{name}: cannot be read: {reason}", 300))
    if not store.runs():
        raise RunNotFoundError(f"{store.url} holds no run that can be read")


def _print_news(watch: StoreWatch) -> None:
    for run, finding in watch.findings():
        print_finding_line(finding, f"{run.name or run.run_id}  ")
    for alert in watch.alerts():
        print_alert_line(alert, f"{alert.run_id}  ")


# ``rlwatch watch SOURCE``: follow a growing log, all logs of a directory, a run of a tracker, or a store.


ExtraMetrics = Callable[[], Mapping[str, float]]
EPILOG = examples(
    "rlwatch watch train.log",
    "rlwatch watch train.log --once || echo 'critical alarm'",
    "rlwatch watch ./outputs --logs '*.log'",
    "rlwatch watch train.log --engine http://gpu-2:8000/metrics",
    "rlwatch watch wandb/latest-run",
    "rlwatch watch ./rlwatch-runs",
    "rlwatch watch math-7b-s3 --poll 10",
)


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A log file that grows, a directory of logs, a run of TensorBoard or wandb (its directory, its file, "
        "or wandb://entity/project/run), a store (directory or URL), or a run of --store.",
    ),
]
OnceOption = Annotated[
    bool, typer.Option("--once", help="Process the present rows and exit, with the exit codes of scan.")
]
PollOption = Annotated[float, typer.Option("--poll", min=0.1, metavar="SECONDS", help="Seconds between polls.")]
NoStoreOption = Annotated[bool, typer.Option("--no-store", help="Log only: do not record the run or queue alerts.")]
LogsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logs", metavar="PATTERN", help="Directory only: patterns of log names.", show_default="usual log names"
    ),
]
ProjectOption = Annotated[
    str, typer.Option("--project", help="Log only: project of the run.", show_default="from the log, else default")
]
NameOption = Annotated[
    str, typer.Option("--name", help="Log only: display name of the run.", show_default="from the log, else the id")
]
RunIdOption = Annotated[
    str | None,
    typer.Option(
        "--run-id", metavar="ID", help="Log only: id of the run in the store.", show_default="derived from its path"
    ),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="Log only: metrics URL of a rollout engine (vLLM, SGLang), http://HOST:8000/metrics, recorded with "
        "new rows. Repeatable.",
    ),
]


def watch(
    source_: SourceArgument,
    *,
    once: OnceOption = False,
    poll: PollOption = 2.0,
    no_store: NoStoreOption = False,
    logs: LogsOption = None,
    project: ProjectOption = "",
    name: NameOption = "",
    run: RunOfLogOption = None,
    run_id: RunIdOption = None,
    engine: EngineOption = None,
    read_as: ReadAsOption = None,
    pattern: PatternOption = None,
    source: TrainerOption = "",
    mapped: MapOption = None,
    config: ConfigOption = None,
    store: StoreOption = None,
) -> None:
    """Print findings and alerts as they occur, and deliver the alerts. Stop with Ctrl-C.

    A log is recorded as a run of the store, so the dashboard shows it; a second watch continues where the last one
    ended. In a directory every log, also in sub-directories and created later, is a run. For a store, the alerts of
    every run are delivered, even if its trainer is gone.
    """
    from rlwatch.importers.wandb_runs import wandb_run

    path = Path(source_)
    reads, named = format_of(read_as, pattern), naming_of(mapped, config)
    log = NamedLog(path, run, reads, named, trainer=source, project=project, name=name, run_id=run_id)
    into = f"memory://watch-{uuid4().hex}" if no_store else store
    address = None if path.exists() else wandb_run(source_)
    with sigterm_as_ctrl_c(), _asking(engine or (), path, address, once=once or bool(logs)) as extra:
        if path.is_file():
            _watch_log(log, into, config, once=once, poll_s=poll, extra=extra)
        elif path.is_dir() and (patterns := _logs_in(path, logs)):
            _watch_many(log, patterns, into, config, once=once, poll_s=poll)
        elif path.is_dir() and not logs and _is_run(path):
            _watch_log(log, into, config, once=once, poll_s=poll, extra=extra)
        elif address:
            _watch_log(replace(log, path=Path(address)), into, config, once=once, poll_s=poll, extra=extra, wandb=True)
        elif "://" in source_ or path.is_dir():
            if path.is_dir():
                _some_run_in(path, once=once)
            _watch_store(source_, None, config, once=once, poll_s=poll)
        elif path.exists():
            _not_a_log(path)
        else:
            _watch_store(store, source_, config, once=once, poll_s=poll)


@contextmanager
def _asking(engines: Sequence[str], path: Path, address: str | None, *, once: bool) -> Iterator[ExtraMetrics]:
    """Read ``engines`` in a background thread; yields a function that returns their metrics since its last call.

    Raises ``ConfigError`` if there are no rows to add the metrics to.
    """
    if not engines:
        yield dict
        return
    from rlwatch.cli.console import warn
    from rlwatch.run.engines import Engines, addresses
    from rlwatch.run.machine import MachineThread

    if once or not (address or path.is_file() or (path.is_dir() and _is_run(path))):
        raise ConfigError(
            "--engine goes with the rows of one log that is followed; the rows of a store are its trainers': say "
            "rlwatch.init(engines=...) or RLWATCH_ENGINES there"
        )
    asked = Engines(addresses(engines), report=warn)
    thread = MachineThread(lambda: asked.read)
    thread.start()
    try:
        yield thread.taken
    finally:
        thread.stop()


def _watch_log(
    log: NamedLog,
    store: str | None,
    config: Path | None,
    *,
    once: bool,
    poll_s: float,
    extra: ExtraMetrics,
    wandb: bool = False,
) -> None:
    from rlwatch.cli import watch_log
    from rlwatch.importers.naming import NONE
    from rlwatch.importers.wandb_runs import WandbTail

    tail = WandbTail(str(log.path), naming=log.naming or NONE) if wandb else None
    if once:
        raise typer.Exit(watch_log.scan_once(log, store, config, tail))
    watch_log.follow(log, store, config, lambda: time.sleep(poll_s), tail=tail, beside=extra)


def _logs_in(directory: Path, patterns: list[str] | None) -> Sequence[str]:
    """Return the patterns of logs to follow in a directory; none if it is a store, one run, or has no log."""
    from rlwatch.importers.registry import PATTERNS, logs_below

    if patterns:
        return patterns
    if any(directory.glob("*/run.db")) or _is_run(directory):
        return ()
    return PATTERNS if next(logs_below(directory), None) else ()


def _some_run_in(directory: Path, *, once: bool) -> None:
    """Warn if the directory has neither a log nor a run of a store; raise the error if logs cannot come later."""
    from rlwatch.cli.console import warn
    from rlwatch.importers.registry import PATTERNS

    if any(directory.glob("*/run.db")):
        return
    problem = f"holds nothing to watch: no run of a store, and no log called {', '.join(PATTERNS)} or as --logs says"
    if once:
        raise ImportFormatError(str(directory), problem)
    warn(f"{directory} {problem}; waiting for runs")


def _not_a_log(path: Path) -> None:
    from rlwatch.importers.registry import readable

    readable(path)


def _is_run(directory: Path) -> bool:
    """Return whether the directory itself is the run of a tracker, and the only log in it."""
    from rlwatch.importers.aim_repository import aim_repository
    from rlwatch.importers.base import DirectoryImporter
    from rlwatch.importers.registry import logs_below, of_directory, run_directory

    run = run_directory(directory) or aim_repository(directory)
    below = list(islice(logs_below(directory), 2))
    if run is not None and run.is_dir() and isinstance(of_directory(run), DirectoryImporter):
        return run == directory or not below
    return run is not None and [run] == below


def _watch_many(
    log: NamedLog, patterns: Sequence[str], store: str | None, config: Path | None, *, once: bool, poll_s: float
) -> None:
    from rlwatch.cli import watch_many

    if log.run or log.run_id:
        raise ConfigError(f"{log.path} is a directory of logs, each its own run; --run and --run-id are for one log")
    if once:
        raise typer.Exit(watch_many.look_once(log, patterns, store, config))
    watch_many.follow(log, patterns, store, config, lambda: time.sleep(poll_s))


def _watch_store(url: str | None, run: str | None, config: Path | None, *, once: bool, poll_s: float) -> None:
    with no_log_either(run):
        if once:
            raise typer.Exit(judge_store_once(url, run, config))
        follow_store(url, run, config, lambda: time.sleep(poll_s), poll_s)
