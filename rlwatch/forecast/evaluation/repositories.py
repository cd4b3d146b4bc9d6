"""What alarms found in runs of others, repository by repository.

Runs of one repository share code, model and data: five of them that fail alike are little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlwatch.forecast.evaluation.alarms import Alarms
from rlwatch.forecast.evaluation.placebo import at_least, expected
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints
from rlwatch.forecast.evaluation.timeline import AFTER, AFTER_ROWS, BEFORE

ONCE = "each once"
"""The name under which all repositories stand, each counted as one."""
Names = npt.NDArray[np.str_]


@dataclass(frozen=True)
class Hits:
    """``found`` failures had an alarm in a window.

    ``placebo``: how many a tool would have hit that alarms in them as it does in clean runs over the same steps, each
    repository's clean runs weighing the same; ``p``: chance of as many hits or more then.
    """

    found: int
    placebo: float
    p: float


@dataclass(frozen=True)
class Repository:
    """Of ``failures``, early ones too: with an alarm ``by_onset`` (from 100 steps before), and ``late``, by 10 steps or
    10 logged rows after it.

    Of an early failure both count from the start of monitoring. ``clean_alarmed`` of ``clean`` runs had any alarm.
    Under :data:`ONCE` all these count repositories: found is one in half or more of its failures, alarmed one in half
    or more of its clean runs.
    """

    failures: int
    by_onset: Hits
    late: Hits
    clean: int
    clean_alarmed: int


@dataclass(frozen=True)
class _Case:
    """One repository: of each window whether its failures were found and the chance of each; its clean runs' alarms."""

    windows: tuple[tuple[Bools, Floats], tuple[Bools, Floats]]
    alarmed: Bools

    @property
    def failures(self) -> int:
        return len(self.windows[0][0])

    def counted(self) -> Repository:
        by_onset, late = (_hits(found, chances) for found, chances in self.windows)
        return Repository(self.failures, by_onset, late, len(self.alarmed), int(self.alarmed.sum()))


def by_repository(alarms: Alarms) -> dict[str, Repository]:
    """Of each repository that a label names, and last of all of them, each once; nothing where none is named."""
    line = alarms.timeline
    names: Names = np.array([label.repository for label in line.labels], dtype=np.str_)
    known = sorted(set(names.tolist()) - {""})
    if not known:
        return {}
    failures = np.sort(np.concatenate([line.events, line.early]))
    first, onset = line.window(failures, -BEFORE, 0)
    onset = np.maximum(onset, line.start)
    late = np.maximum(onset + AFTER, line.rows_after(failures, onset, AFTER_ROWS))
    windows = [(alarms.within(failures, first, last), _chances(alarms, names, first, last)) for last in (onset, late)]
    alarmed = alarms.ever(line.clean)
    cases = {}
    for name in known:
        mine = names[failures] == name
        by_onset, after = ((found[mine], chances[mine]) for found, chances in windows)
        cases[name] = _Case((by_onset, after), alarmed[names[line.clean] == name])
    return {name: case.counted() for name, case in cases.items()} | {ONCE: _once(list(cases.values()))}


def _chances(alarms: Alarms, names: Names, first: Ints, last: Ints) -> Floats:
    """Of each window, the share of clean runs with an alarm in it: the mean over repositories that reach it."""
    clean = alarms.timeline.clean
    reached = alarms.timeline.table.last[clean][None, :] >= first[:, None]
    alarmed = alarms.within(np.broadcast_to(clean, reached.shape), first[:, None], last[:, None]) & reached
    shares, there = np.zeros(len(first)), np.zeros(len(first))
    for name in np.unique(names[clean]):
        mine = names[clean] == name
        shares += expected(alarmed[:, mine], reached[:, mine])
        there += reached[:, mine].any(axis=1)
    return shares / np.maximum(there, 1)


def _once(cases: Sequence[_Case]) -> Repository:
    """Each repository as one failure, as likely to be found by chance as its failures are on average."""
    failing = [case for case in cases if case.failures]
    by_onset, late = (
        _hits(
            np.array([case.windows[i][0].mean() >= 0.5 for case in failing], dtype=bool),
            np.array([case.windows[i][1].mean() for case in failing], dtype=np.float64),
        )
        for i in (0, 1)
    )
    sound = [bool(case.alarmed.mean() >= 0.5) for case in cases if len(case.alarmed)]
    return Repository(len(failing), by_onset, late, len(sound), sum(sound))


def _hits(found: Bools, chances: Floats) -> Hits:
    count = int(found.sum())
    return Hits(count, float(chances.sum()), at_least(count, chances.tolist()))
