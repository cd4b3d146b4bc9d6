"""``rlwatch watch`` of a directory: every log in it and below is a run, also those that come later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlwatch.cli.config_file import alerting_of
from rlwatch.cli.console import errors, say
from rlwatch.cli.delivery import deliver_once, delivering
from rlwatch.cli.ending import unbroken
from rlwatch.cli.fleet import Fleet
from rlwatch.cli.log_run import Log
from rlwatch.cli.log_watch import LogWatch
from rlwatch.cli.stores import opened
from rlwatch.cli.watch_log import ever_critical, watch_of
from rlwatch.cli.wording import clean, one_line
from rlwatch.clock import Clock
from rlwatch.errors import ImportFormatError
from rlwatch.ports import Store
from rlwatch.run.alerting import Alerting

LONGEST_LINE = 600
"""Characters of what is told of a log."""


def look_once(log: Log, patterns: Sequence[str], store_url: str | None, config: Path | None) -> int:
    """Record and judge every log as it stands, deliver, and answer 1 if anything in any was critical.

    Raises ``ImportFormatError`` if none could be read.
    """
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        fleet = _fleet(log, patterns, store, alerting, once=True)
        while fleet.look():
            pass
        fleet.end("the log was read to its end")
        if not fleet.recorded:
            raise ImportFormatError(str(log.path), _nothing(fleet, patterns))
        delivered = deliver_once(store, alerting)
        code = int(any(ever_critical(store, run_id) for run_id in fleet.recorded))
    say(f"{len(fleet.recorded)} runs of {len(fleet.members)} logs{f'; alerts {delivered}' if delivered else ''}")
    return code


def follow(
    log: Log,
    patterns: Sequence[str],
    store_url: str | None,
    config: Path | None,
    pause: Callable[[], None],
    *,
    clock: Clock | None = None,
) -> None:
    """Record and judge the logs as they grow, until ``pause`` raises ``KeyboardInterrupt``."""
    with opened(store_url) as store:
        alerting = alerting_of(config, store)
        with delivering(store, alerting):
            fleet = _fleet(log, patterns, store, alerting, clock)
            say(f"watching the logs in {log.path} ({', '.join(patterns)}); Ctrl-C stops", style="dim")
            try:
                with status_line(fleet) as show:
                    while True:
                        behind = fleet.look()
                        show()
                        if not behind:
                            pause()
            except KeyboardInterrupt:
                say("stopped", style="dim")
            finally:
                with unbroken():
                    fleet.end("the watch ended")


@contextmanager
def status_line(fleet: Fleet) -> Iterator[Callable[[], None]]:
    """One line about all runs that stays at the bottom of a terminal; nothing anywhere else."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    with errors().status("looking") as status:
        yield lambda: status.update(clean(one_line(summary(fleet), 300)))


def summary(fleet: Fleet) -> str:
    """How many logs there are, in which state, and which of them said something last."""
    runs = fleet.runs
    behind = sum(member.watch is not None and member.watch.behind for member in runs)
    broken = sum(bool(member.problem) for member in fleet.members.values())
    resting = len(fleet.members) - len(runs) - broken
    counts = {"live": len(runs), "catching up": behind, "silent": max(0, resting), "not readable": broken}
    newest = max(runs, key=lambda member: member.grew_at, default=None)
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(fleet.members)} logs: {told or 'none yet'}" + (f"; last heard: {newest.name}" if newest else "")


def _fleet(
    log: Log,
    patterns: Sequence[str],
    store: Store,
    alerting: Alerting,
    clock: Clock | None = None,
    *,
    once: bool = False,
) -> Fleet:
    def begin(path: Path, name: str) -> LogWatch:
        return watch_of(
            replace(log, path=path, name=log.name or name),
            store,
            alerting,
            clock=clock,
            prefix=f"{one_line(name, 200)}  ",
        )

    return Fleet(log.path, patterns, begin, _tell, clock=clock, once=once)


def _nothing(fleet: Fleet, patterns: Sequence[str]) -> str:
    if not fleet.members:
        return f"no file in it or below is called {', '.join(patterns)}; say what its logs are called with --logs"
    return f"none of its {len(fleet.members)} logs could be read; the reason of each is above"


def _tell(line: str, problem: bool) -> None:
    line = one_line(line, LONGEST_LINE)  # names of files may hold line ends
    if problem:
        errors().print(clean(line), style="yellow", soft_wrap=True)
    else:
        say(line, style="dim")
