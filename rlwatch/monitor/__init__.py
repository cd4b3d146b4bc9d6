"""One engine for live runs, tailed logs and replays: records in, findings and alerts out."""

from rlwatch.detectors.base import NotRun
from rlwatch.monitor.engine import Monitor, Outcome

__all__ = ["Monitor", "NotRun", "Outcome"]
