"""Findings made by hand."""

from rlwatch.records import Event, Finding, Severity

WARNING, CRITICAL, INFO = Severity.WARNING, Severity.CRITICAL, Severity.INFO


def found(kind, onset, severity=CRITICAL, *, delay=9, attempt=1, message="", metric=""):
    """A finding whose condition began at ``onset`` and was seen ``delay`` steps later."""
    return Finding("d", kind, severity, onset + delay, onset, message or kind, metric=metric, attempt=attempt)


def happened(kind, step, **body):
    """An event."""
    return Event(kind, step, body)
