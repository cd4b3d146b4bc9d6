"""Why the findings do not suffice for a cause, and what would have to be measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlwatch.diagnosis.causes import Cause

WANTED = {
    "trainer-engine mismatch": "mismatch/",
    "entropy": "policy/entropy",
    "gradient norm": "optim/grad_norm",
    "importance ratios": "ratio/",
    "response length": "len/",
}
"""What tells the usual causes apart, and the metrics it shows in."""


def lacking(causes: Sequence[Cause], measured: Collection[str] | None) -> str:
    """One sentence or two on ``causes``, the likeliest first. ``measured`` None: what is logged is not known."""
    first = causes[0]
    text = f"no cause can be named: {first.summary}; {first.why}"
    missing = [] if measured is None else [name for name, prefix in WANTED.items() if not _any(measured, prefix)]
    return f"{text}. Not measured: {', '.join(missing)}" if missing else text


def _any(measured: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in measured)
