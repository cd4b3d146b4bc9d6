"""One engine for live runs, tailed logs and replays: records in, findings and alerts out."""

from rlwatch.monitor.engine import Monitor, NotRun, Outcome

__all__ = ["Monitor", "NotRun", "Outcome"]
