"""The engine that judges live runs, tailed logs and replays alike: rows and events in, findings and alerts out."""

from rlwatch.detectors.index import NotRun
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.step_judge import MonitorOutcome

__all__ = ["Monitor", "MonitorOutcome", "NotRun"]
