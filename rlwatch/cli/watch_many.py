"""``rlwatch watch`` of a directory: record each log in it and below, also later ones, as a separate run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlwatch.cli.background import deliver_once, delivering, unbroken
from rlwatch.cli.console import errors, print_text, warn
from rlwatch.cli.import_log import NamedLog
from rlwatch.cli.names import reading_lines
from rlwatch.cli.options import alerting_of, opened
from rlwatch.cli.watch_log import LogWatch, ever_critical, watch_of
from rlwatch.clock import Clock, SystemClock
from rlwatch.error_boundary import call_or, raised_by
from rlwatch.errors import ImportFormatError, RLWatchError
from rlwatch.importers.registry import logs_below
from rlwatch.importers.tensorboard_events import event_files
from rlwatch.ports import Store
from rlwatch.run.alerting import Alerting
from rlwatch.wording import for_terminal, one_line

DISCOVER_S = 10.0
"""Seconds between two searches of the directory for new logs."""
RETRY_S = 60.0
"""Seconds until an unreadable log is tried again, and of silence after which the reason is reported."""
RETRY_FACTOR = 20.0
"""Factor by which the time spent on a failed try is multiplied to get the wait until the next one."""
REST_S = 6 * 3600.0
"""Seconds of silence after which a log counts as finished until it grows."""
OLD_S = 3600.0
"""Seconds of silence after which a log that existed before the watch counts as finished."""
MOST_OPEN = 64
"""Most log files kept open between two reads: those that grew last."""
MOST_LIVE = 100
"""Most runs written at the same time; above it, those silent longest are closed."""


@dataclass(slots=True)
class WatchedLog:
    """One log of a watched directory. While ``watch`` is None it is closed, until ``mark`` changes or
    at ``retry_at``.
    """

    path: Path
    name: str
    watch: LogWatch | None = None
    grew_at: float = 0.0
    patience: float = REST_S
    mark: object = None
    retry_at: float | None = None
    problem: str = ""
    names: int = 0
    """Number of metric names in the log when their mapping was last reported."""
    spent: float = 0.0
    """Seconds spent reading the log since it was last opened."""


class LogDirectory:
    """All logs in ``directory`` and below whose names match ``patterns``, each recorded as a run.

    Parameters
    ----------
    begin
        Makes the watch of a log, given its path and name.
    tell
        Called with a line for each change of a log (new run, removed log, error) and True if it is an error.
    once
        True to read logs to their present ends and no further.
    most_open, most_live
        Most log files kept open between two reads, and most runs written at the same time.
    """

    def __init__(
        self,
        directory: Path,
        patterns: Sequence[str],
        begin: Callable[[Path, str], LogWatch],
        tell: Callable[[str, bool], None],
        *,
        clock: Clock | None = None,
        once: bool = False,
        most_open: int = MOST_OPEN,
        most_live: int = MOST_LIVE,
    ) -> None:
        self._most_open, self._most_live = most_open, most_live
        self.members: dict[Path, WatchedLog] = {}
        self.recorded: dict[str, None] = {}
        """Ids of all runs recorded so far."""
        self._closed: dict[Path, str] = {}
        """Directories that cannot be searched, and why."""
        self._read_as: set[str] = set()
        """Lines on the mapping of names that were reported; equal lines of several logs are reported once."""
        self._directory, self._patterns = directory, patterns
        self._begin, self._report = begin, tell
        self._clock = clock or SystemClock()
        self._once = once
        self._discover_at = 0.0
        self._begun = 0
        self._crowded = False

    @property
    def runs(self) -> list[WatchedLog]:
        """The logs of the directory that are being recorded."""
        return [member for member in self.members.values() if member.watch and member.watch.recording]

    def look(self) -> bool:
        """Read one batch of every log in the directory; return True if some have more to read at once."""
        if self._clock.monotonic() >= self._discover_at:
            self._search()
            self._discover_at = self._clock.monotonic() + DISCOVER_S
        behind = self._crowded = False
        for member in list(self.members.values()):
            with unbroken():
                behind = self._guarded(member, self._look_at) or behind
        with unbroken():
            self._keep_bounds(self._most_live)
        return behind or self._crowded

    def end(self, reason: str) -> None:
        """End the runs of all logs with ``reason``."""
        for member in self.members.values():
            self._guarded(member, lambda one: self._rest(one, reason))

    def _search(self) -> None:
        error = raised_by(self._discover)
        if error is not None:  # known logs must still be read
            self._unsearched(self._directory, error)

    def _unsearched(self, directory: Path, error: Exception) -> None:
        problem = error_line(error)
        if self._closed.get(directory) != problem:
            self._closed[directory] = problem
            self._report(f"{directory}: cannot be searched for logs: {problem}", True)

    def _discover(self) -> None:
        there = dict.fromkeys(logs_below(self._directory, self._patterns, self._unsearched))
        for path in there:
            if path not in self.members:
                self.members[path] = WatchedLog(path, str(path.relative_to(self._directory)) or path.name)
        for path in [path for path in self.members if path not in there and not path.exists()]:
            member = self.members.pop(path)
            if member.watch is not None and member.watch.recording is not None:
                self._report(f"{member.name}: the log is gone; its run ends", False)
            self._guarded(member, lambda one: self._rest(one, "the log is gone"))

    def _guarded(self, member: WatchedLog, do: Callable[[WatchedLog], bool]) -> bool:
        """Report an error of one log once, also an unexpected one, and go on with the others."""
        began = self._clock.monotonic()
        try:
            return call_or(lambda: do(member), lambda error: self._failed(member, error, began))
        finally:
            member.spent += self._clock.monotonic() - began

    def _failed(self, member: WatchedLog, error: Exception, began: float) -> bool:
        """Skip the log for a time that grows with the time it took."""
        self._complain(member, error_line(error))
        watch, member.watch = member.watch, None
        now = self._clock.monotonic()
        spent, member.spent = member.spent + now - began, 0.0
        member.retry_at, member.mark = now + max(RETRY_S, RETRY_FACTOR * spent), None
        if watch is not None:
            self._abandon(watch)
        return False

    def _complain(self, member: WatchedLog, problem: str) -> None:
        if problem != member.problem:
            self._report(f"{member.name}: {problem}", True)
        member.problem = problem

    def _abandon(self, watch: LogWatch) -> None:
        with suppress(Exception):  # the run stays as its writer left it; the problem was reported
            watch.abandon("its log is no longer readable")

    def _look_at(self, member: WatchedLog) -> bool:
        watch = member.watch or self._woken(member)
        if watch is None:
            return False
        known = set(watch.run_ids)
        found = watch.look()
        if found:
            member.grew_at, member.problem = self._clock.monotonic(), ""
        if watch.recording is not None and watch.run_id not in known:
            self.recorded.update(watch.run_ids)
            self._report(f"{member.name}: run {watch.run_id} ({watch.tail.format})", False)
        if found and not watch.behind:
            self._report_names(member, watch)
        if watch.recording is None and not watch.behind and self._clock.now() - _modified(member.path) > RETRY_S:
            self._report_why_not(member, watch)
        if not watch.behind and self._clock.monotonic() - member.grew_at >= member.patience:
            self._rest(member, "no rows for hours")
        return watch.behind

    def _woken(self, member: WatchedLog) -> LogWatch | None:
        """Return a new watch of a log that is new, has changed since it was closed, or must be tried again."""
        now = self._clock.monotonic()
        if member.retry_at is not None and now < member.retry_at:
            return None
        mark = _mark(member.path)
        if member.retry_at is None and mark == member.mark:
            return None
        if not self._has_room():
            self._crowded = True
            return None
        first = member.mark is None and member.retry_at is None
        member.retry_at = None
        member.watch = self._begin(member.path, member.name)
        old = first and self._clock.now() - _modified(member.path) > OLD_S
        member.grew_at, member.patience = (now - REST_S, 0.0) if old else (now, REST_S)
        return member.watch

    def _has_room(self) -> bool:
        """Return whether one more run may be begun, so that not all runs of a directory are open at once."""
        self._begun += 1
        if self._begun <= self._most_live // 4:
            return True
        self._keep_bounds(self._most_live * 3 // 4)
        self._begun = 0
        return len(self.runs) < self._most_live  # else logs with unread rows come first

    def _rest(self, member: WatchedLog, reason: str) -> bool:
        watch, member.watch = member.watch, None
        if watch is not None:
            member.mark = _mark(member.path)
            watch.end(reason, whole=self._once)
            self.recorded.update(watch.run_ids)
            self._report_names(member, watch)
            if self._once and watch.recording is None:
                self._report_why_not(member, watch, also_empty=True)
            if self._once and watch.recording is not None and (left_out := watch.left_out):
                self._report(f"{member.name}: skipped: {left_out}", False)
        return False

    def _report_names(self, member: WatchedLog, watch: LogWatch) -> None:
        """Report the mapping of the names of a log, unless the same was reported before."""
        if len(watch.names) == member.names:
            return
        member.names = len(watch.names)
        for line in reading_lines(watch.names, watch.log.trainer or watch.tail.source):
            if line not in self._read_as:
                self._read_as.add(line)
                self._report(f"{member.name}: {line}", False)

    def _report_why_not(self, member: WatchedLog, watch: LogWatch, *, also_empty: bool = False) -> None:
        """Report why nothing of the log was recorded."""
        if also_empty or watch.tail.read[1]:
            self._complain(member, watch.why_nothing)

    def _keep_bounds(self, live: int) -> None:
        """Close the files of logs that have been silent longest, and, above a second limit, their runs."""
        waiting = sorted((m for m in self.members.values() if m.watch), key=lambda m: m.grew_at, reverse=True)
        for member in waiting[self._most_open :]:
            if member.watch is not None:
                member.watch.tail.release()
        for member in [m for m in waiting if m.watch and m.watch.recording and not m.watch.behind][live:]:
            self._guarded(member, lambda one: self._rest(one, "silent while many others wrote"))


def error_line(error: Exception) -> str:
    """Return the message of an error as one line; for an unexpected error with its type."""
    text = " ".join(str(error).split())
    if isinstance(error, RLWatchError | OSError):
        return text
    return f"unexpected {type(error).__name__}{f': {text}' if text else ''}"


def _mark(path: Path) -> object:
    """Return a value that changes when the log does; None if there is no log."""
    try:
        stats = [(file.name, file.stat()) for file in _files(path)]
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def _modified(path: Path) -> float:
    try:
        return max((file.stat().st_mtime for file in _files(path)), default=0.0)
    except OSError:
        return 0.0


def _files(path: Path) -> list[Path]:
    return event_files(path) if path.is_dir() else [path]


# ``rlwatch watch`` of a directory: every log in it and below is a run, also those that come later.

LONGEST_LINE = 600
"""Most characters of a printed line about a log."""


def look_once(log: NamedLog, patterns: Sequence[str], store_url: str | None, config: Path | None) -> int:
    """Record and judge every log in a directory once, send alert messages, and return 1 if any alert was critical,
    else 0.

    ``log`` has the directory as its path; ``patterns`` select file names. Raises ``ImportFormatError`` if no log could
    be read.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        fleet = fleet_of(log, patterns, store, alerting, once=True)
        while fleet.look():
            pass
        fleet.end("end of the log reached")
        if not fleet.recorded:
            raise ImportFormatError(str(log.path), _nothing(fleet, patterns))
        delivered = deliver_once(store, alerting)
        code = int(any(ever_critical(store, run_id) for run_id in fleet.recorded))
    print_text(f"{len(fleet.recorded)} runs of {len(fleet.members)} logs{f'; alerts {delivered}' if delivered else ''}")
    return code


def follow(
    log: NamedLog,
    patterns: Sequence[str],
    store_url: str | None,
    config: Path | None,
    pause: Callable[[], None],
    *,
    clock: Clock | None = None,
    most_open: int = MOST_OPEN,
    most_live: int = MOST_LIVE,
) -> None:
    """Record and judge the logs of a directory as they grow, until ``pause`` raises ``KeyboardInterrupt``.

    ``most_open`` and ``most_live`` are those of :class:`LogDirectory`.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        with delivering(store, alerting):
            fleet = fleet_of(log, patterns, store, alerting, clock, most_open=most_open, most_live=most_live)
            print_text(f"watching the logs in {log.path} ({', '.join(patterns)}); stop with Ctrl-C", style="dim")
            try:
                with status_line(fleet) as show:
                    while True:
                        behind = fleet.look()
                        show()
                        if not behind:
                            pause()
            except KeyboardInterrupt:
                print_text("stopped", style="dim")
            finally:
                with unbroken():
                    fleet.end("watch ended")


@contextmanager
def status_line(fleet: LogDirectory) -> Iterator[Callable[[], None]]:
    """Show a status line about all logs at the bottom of a terminal within the block; yields a function that updates
    it.

    Nothing is shown if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with errors().status("looking") as status:
        yield lambda: status.update(for_terminal(one_line(summary(fleet), 300)))


def summary(fleet: LogDirectory) -> str:
    """Return the number of watched logs in each state, and the name of the one that grew last."""
    runs = fleet.runs
    behind = sum(member.watch is not None and member.watch.behind for member in runs)
    broken = sum(bool(member.problem) for member in fleet.members.values())
    resting = len(fleet.members) - len(runs) - broken
    counts = {"live": len(runs), "catching up": behind, "silent": max(0, resting), "not readable": broken}
    newest = max(runs, key=lambda member: member.grew_at, default=None)
    counted = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(fleet.members)} logs: {counted or 'none yet'}" + (f"; last seen: {newest.name}" if newest else "")


def fleet_of(
    log: NamedLog,
    patterns: Sequence[str],
    store: Store,
    alerting: Alerting,
    clock: Clock | None = None,
    *,
    once: bool = False,
    most_open: int = MOST_OPEN,
    most_live: int = MOST_LIVE,
) -> LogDirectory:
    """Return a directory watch that records the logs in ``log``'s directory that match ``patterns`` into ``store``."""

    def begin(path: Path, name: str) -> LogWatch:
        return watch_of(
            replace(log, path=path, name=log.name or name),
            store,
            alerting,
            clock=clock,
            prefix=f"{one_line(name, 200)}  ",
        )

    return LogDirectory(
        log.path, patterns, begin, _print_line, clock=clock, once=once, most_open=most_open, most_live=most_live
    )


def _nothing(fleet: LogDirectory, patterns: Sequence[str]) -> str:
    if not fleet.members:
        return f"no file in it or below is called {', '.join(patterns)}; give patterns with --logs"
    return f"none of its {len(fleet.members)} logs could be read; the reason of each is above"


def _print_line(line: str, problem: bool) -> None:
    line = one_line(line, LONGEST_LINE)  # names of files may hold line ends
    if problem:
        warn(line)
    else:
        print_text(line, style="dim")
