"""Which rows of which runs count for what: where an alarm is false, where it is in time, where a run is at risk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlwatch.forecast.evaluation.labels import Label, Labels, Outcome
from rlwatch.forecast.evaluation.limits import limits
from rlwatch.forecast.evaluation.run_table import Bools, Floats, Ints, RunTable

BEFORE = 100
"""An alarm earlier than so many steps before an onset is false."""
LEAD, EARLY_LEAD = 5, 10
"""Steps before the onset by which an alarm forecasts; by which it forecasts early."""
AFTER, AFTER_ROWS = 10, 10
"""Steps (or logged rows) after the onset by which an alarm still detects."""

TIME_TO_WARN = 20
"""Steps from fault to onset below which nobody could have warned in time: there was nothing to be seen."""
BUILT_UP = f"built up over {TIME_TO_WARN} steps or more"
SUDDEN = f"fault less than {TIME_TO_WARN} steps before"
AT_ONCE = "of a kind that comes at once"


@dataclass(frozen=True)
class Timeline:
    """A table and its labels, as arrays. Monitoring starts at step 40; nothing before counts for or against a tool."""

    table: RunTable
    labels: Sequence[Label]

    @classmethod
    def of(cls, table: RunTable, labels: Labels) -> Timeline:
        """The labels in the order of the table's runs."""
        return cls(table, labels.of(table))

    def are(self, *outcomes: Outcome) -> Bools:
        """Of each run, whether it came out so."""
        return np.array([label.outcome in outcomes for label in self.labels], dtype=bool)

    @cached_property
    def onset(self) -> Floats:
        """Of each run; infinite without one."""
        return np.array([np.inf if each.onset is None else each.onset for each in self.labels], dtype=np.float64)

    @cached_property
    def start(self) -> int:
        """The step at which monitoring starts."""
        return limits().windows.monitored

    @cached_property
    def monitored(self) -> Bools:
        """Rows from there on."""
        return self.table.step >= self.start

    @cached_property
    def clean(self) -> Ints:
        """Places of the clean runs that are monitored at all."""
        return np.flatnonzero(self.are(Outcome.CLEAN) & (self.table.last >= self.start))

    @cached_property
    def untouched(self) -> Ints:
        """Those of them with no fault, not even one that stayed small or was over in time; none where nobody knows."""
        faults = self.table.faults
        known = any(fault is not None for fault in faults)
        return np.array([i for i in self.clean.tolist() if known and faults[i] is None], dtype=np.int64)

    @cached_property
    def events(self) -> Ints:
        """Places of the runs that failed, but not early."""
        return np.flatnonzero(self.are(Outcome.EVENT))

    @cached_property
    def early(self) -> Ints:
        """Places of the runs that failed early and have monitored rows."""
        return np.flatnonzero(self.are(Outcome.EARLY) & (self.table.last >= self.start))

    @cached_property
    def warning(self) -> tuple[str, ...]:
        """Of each event, what there was to be seen before it; "" of other runs, and where no fault is known of."""
        found = [""] * len(self.labels)
        for i in self.events.tolist() if self.table.faults else ():
            fault = self.table.faults[i]
            if fault is not None:
                late = self.onset[i] - fault < TIME_TO_WARN
                at_once = bool(self.table.at_once) and self.table.at_once[i]
                found[i] = AT_ONCE if at_once else SUDDEN if late else BUILT_UP
        return tuple(found)

    def healthy(self, *, strict: bool = False) -> Bools:
        """Rows where an alarm is false: of clean runs, of faulty ones before their fault, and of events more than 100
        steps before the onset.

        ``strict``: also all those of ambiguous and of faulty runs.
        """
        kinds = (Outcome.CLEAN, Outcome.AMBIGUOUS, Outcome.FAULTY) if strict else (Outcome.CLEAN,)
        until = np.where(self.are(*kinds), np.inf, -np.inf)
        until = np.where(self.are(Outcome.EVENT), self.onset - BEFORE, until)
        if not strict:
            until = np.where(self.are(Outcome.FAULTY), self.table.sound_until, until)
        return self.monitored & (self.table.step < until[self.table.run_of])

    @cached_property
    def at_risk(self) -> Bools:
        """Monitored rows before an onset, of runs that did not fail early."""
        return self.monitored & (self.table.step < self.onset[self.table.run_of]) & ~self._early_rows

    @cached_property
    def _early_rows(self) -> Bools:
        return self.are(Outcome.EARLY)[self.table.run_of]

    @cached_property
    def weight(self) -> Floats:
        """Steps that each row stands for, none of them before monitoring starts."""
        return np.minimum(self.table.span, np.maximum(self.table.step - self.start + 1, 0)).astype(np.float64)

    def outcome_within(self, horizon: int) -> tuple[Bools, Bools]:
        """(rows to judge at, whether the run fails within ``horizon`` steps of them).

        Rows so near the end of a run without an onset that nobody knows are left out.
        """
        onset = self.onset[self.table.run_of]
        seen = np.isfinite(onset) | (self.table.step + horizon <= self.table.last[self.table.run_of])
        return self.at_risk & seen, onset - self.table.step <= horizon

    def window(self, runs: Ints, first: int, last: int) -> tuple[Ints, Ints]:
        """Monitored steps from onset + ``first`` to onset + ``last``, both included, of runs with an onset."""
        onset = self.onset[runs].astype(np.int64)
        return np.maximum(onset + first, self.start), onset + last

    def rows_after(self, runs: Ints, steps: Ints, count: int) -> Ints:
        """The step of the ``count``-th logged row after each of ``steps``, or of the run's last row."""
        rows = self.table.find(runs, steps) + count
        return self.table.step[np.minimum(rows, self.table.starts[runs + 1] - 1)]
