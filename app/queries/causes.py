"""What most likely caused a run's trouble, and its post-mortem."""

from __future__ import annotations

import time

from rlwatch.diagnosis import Diagnosis, diagnose
from rlwatch.metrics import known
from rlwatch.records import RunInfo

from .door import store


def diagnosis(run: RunInfo) -> Diagnosis:
    """Of all that was found so far; nothing is read of a run without findings."""
    found = store().findings(run.run_id)
    if not found:
        return Diagnosis(why_not="nothing was found")
    names = known(store().metric_names(run.run_id), run.source)
    return diagnose(found, events=store().events(run.run_id), source=run.source, measured=names)


def report(run_id: str) -> str:
    """The post-mortem as one HTML file."""
    from rlwatch.report import facts_of_run, html

    return html(facts_of_run(store(), run_id, now=time.time()))
