"""The only door from the pages to the store.

Everything returned is a snapshot; everything may raise ``StoreError``. Series and what is computed of them
are read again only when a run moved on (``door.version``); small rows are read afresh.
"""

from .curves import Outline, Trace, canonical_names, metric_names, outline, traces
from .door import store, store_url
from .glance import Fleet, Glance, Vitals, fleet, vitals
from .rows import alerts, alerts_by_run, commands, events, findings, last_values, outbox, run, runs_by_id

__all__ = [
    "Fleet",
    "Glance",
    "Outline",
    "Trace",
    "Vitals",
    "alerts",
    "alerts_by_run",
    "canonical_names",
    "commands",
    "events",
    "findings",
    "fleet",
    "last_values",
    "metric_names",
    "outbox",
    "outline",
    "run",
    "runs_by_id",
    "store",
    "store_url",
    "traces",
    "vitals",
]
