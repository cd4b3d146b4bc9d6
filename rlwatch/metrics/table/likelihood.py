# ruff: noqa: E501  (one row of the table is one line or two)
"""Whether an update lowers the likelihood of the very responses it rewards (arXiv 2512.04220)."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, nats

# fmt: off

ROWS: tuple[Metric, ...] = (
    nats("lld/logp_positive", Family.EXPLORATION, "mean log-prob of the tokens of responses with a positive advantage", high=0.0),
    nats("lld/displacement", Family.EXPLORATION, "log-prob now less log-prob before the update, on tokens of positive advantage"),
    fraction("lld/displaced_frac", Family.EXPLORATION, "responses of positive advantage that became less likely", aggregator="sequence fraction"),
    fraction("lld/negative_push", Family.EXPLORATION, "share of |A| (1 - p), summed over tokens, that pushes down", aggregator="weighted token fraction"),
    nats("lld/penalty", Family.EXPLORATION, "LLDS penalty: what actions of responses with A >= 0 lost, where the whole action lost", low=0.0),
)
# fmt: on
