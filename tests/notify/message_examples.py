"""A message as the alert life cycle writes it, with everything in it."""

from __future__ import annotations

from rlwatch.records import JSON, OutboxMessage

PAYLOAD: dict[str, JSON] = {
    "schema_version": 1,
    "event": "firing",
    "text": "[firing critical] math/seed3: entropy_collapse at step 412 (since step 398): entropy is gone",
    "alert": {
        "id": "alert-1",
        "rule": "entropy",
        "kind": "entropy_collapse",
        "detector": "entropy",
        "severity": "critical",
        "state": "firing",
        "message": "entropy fell from 0.31 to 0.02",
        "reason": "it held for 10 steps",
        "onset_step": 398,
        "step": 412,
        "resolved_step": None,
        "fired_at": 1_750_000_000.0,
        "resolved_at": None,
        "labels": {"team": "rl"},
        "run_id": "run-1",
    },
    "also": [{"kind": "kl_drift", "severity": "warning", "id": "alert-2"}],
    "group": {"id": "alert-1", "firing": 2},
    "earlier": [{"kind": "mismatch_growth", "severity": "warning", "onset_step": 301}],
    "cause": {
        "kind": "mismatch_growth",
        "title": "Train-inference mismatch",
        "sure": "strong",
        "why": "what follows from it followed",
        "onset_step": 301,
        "summary": "the mismatch grew from step 301; entropy fell from 398",
    },
    "finding": {"detector": "entropy", "evidence": {"entropy": 0.0200001, "baseline": 0.31, "below": "NaN"}},
    "advice": {
        "kind": "entropy_collapse",
        "title": "Entropy collapse",
        "meaning": "the policy hardly explores any more",
        "actions": [
            {"name": "Clip-Higher", "what": "raise the upper clip", "options": {"trl": "`epsilon_high` 0.28"}},
            {"name": "Lower rate", "what": "halve the learning rate", "options": {}},
            {"name": "Third", "what": "never shown", "options": {}},
        ],
    },
    "run": {"id": "run-1", "name": "seed3", "project": "math", "source": "trl/grpo"},
    "links": {"dashboard": "http://host:8501/run?run=run-1"},
}


def message_with(**more: JSON) -> OutboxMessage:
    """The example with other parts; of tables only the keys that are given."""
    merged = {
        key: {**PAYLOAD.get(key, {}), **value} if isinstance(value, dict) else value for key, value in more.items()
    }
    return OutboxMessage("m-0123456789", "run-1", "alert-1", "channel", PAYLOAD | merged)


MESSAGE = message_with()
