"""A localisation in one sentence."""

from __future__ import annotations

from rlwatch.gradloc.report import Cause, Localisation


def of_culprits(report: Localisation) -> str:
    """Of a step whose tokens were attributed or searched."""
    if not report.culprits:
        return "no token has a gradient"
    if report.cause is Cause.LAYER and report.layers:
        layer = max(report.layers, key=report.layers.__getitem__)
        return f"{layer} holds {report.layers[layer]:.0%} of the squared gradient norm; no single token stands out"
    worst, count = report.culprits[0], len(report.culprits)
    others = f" ({count - 1} more stand out)" if count > 1 else ""
    if worst.share is None:
        return f"one token of sequence {worst.sequence} has the largest gradient{others}: {worst.why}"
    place = f"at position {worst.at.position} of sequence {worst.sequence}"
    return f"one token {place} contributes {worst.share:.0%} of the gradient norm{others}: {worst.why}"
