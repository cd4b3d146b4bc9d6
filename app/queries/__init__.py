"""The only door from the pages to the store.

Everything returned is a snapshot; everything may raise ``StoreError``. Series and what is computed of them
are read again only when a run moved on (``door.version``); small rows are read afresh.
"""

from .causes import diagnosis, report
from .curves import Outline, Trace, canonical_names, metric_names, outline, traces
from .door import store, store_url
from .foretold import Foretold, foretold
from .glance import Fleet, Glance, Vitals, fleet, vitals
from .rows import (
    alerts,
    alerts_by_run,
    commands,
    events,
    findings,
    last_values,
    outbox,
    run,
    runs_by_id,
    silences,
    standing,
)
from .tokens import culprits, far_out, localised, of_step, usual_norm

__all__ = [
    "Fleet",
    "Foretold",
    "Glance",
    "Outline",
    "Trace",
    "Vitals",
    "alerts",
    "alerts_by_run",
    "canonical_names",
    "commands",
    "culprits",
    "diagnosis",
    "events",
    "far_out",
    "findings",
    "fleet",
    "foretold",
    "last_values",
    "localised",
    "metric_names",
    "of_step",
    "outbox",
    "outline",
    "report",
    "run",
    "runs_by_id",
    "silences",
    "standing",
    "store",
    "store_url",
    "traces",
    "usual_norm",
    "vitals",
]
