"""Detect that a tool of an agent fails, times out, or takes far longer than at the run's beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlwatch.detectors.base import finite
from rlwatch.detectors.reward.verifier_health import VerifierHealth
from rlwatch.records import ClosedStep

CALLS, ERRORS, TIMEOUTS, SECONDS = "tool/calls/", "tool/errors/", "tool/timeouts/", "tool/seconds/"
SHARES = {ERRORS: "a share of {} of its calls fails", TIMEOUTS: "a share of {} of its calls times out"}
PREFIXES = (*SHARES, SECONDS)
LEAST_CALLS = 8
"""Calls of a tool in a row from which its shares and its latency are judged; of fewer, two failures are a rise."""


class ToolHealth(VerifierHealth):
    """Detector of a failing or slow tool, with the limits of :class:`VerifierHealth`.

    Rows with fewer than ``LEAST_CALLS`` calls of the tool are left out, if calls are counted. A policy that calls a
    tool with worse arguments raises its errors, too, so that failures are no more than a warning.
    """

    name: ClassVar[str] = "tool_health"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((prefix,) for prefix in PREFIXES)
    families: ClassVar[tuple[str, ...]] = PREFIXES
    levels: ClassVar[Mapping[str, str]] = SHARES
    seconds: ClassVar[str] = SECONDS

    def enough(self, step: ClosedStep, function: str) -> bool:
        """Return True if the row has enough calls of the tool ``function``, or does not count them."""
        calls = finite(step, CALLS + function)
        return calls is None or calls >= LEAST_CALLS
