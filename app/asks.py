"""What a person can ask of a live run, in the words of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RESET = "reset-reference"


@dataclass(frozen=True, slots=True)
class Ask:
    """One command. ``says`` is Markdown; ``typed``: the run's name must be typed, because it cannot be undone.

    ``labels`` and ``values`` name the arguments and the values of choices.
    """

    kind: str
    menu: str
    title: str
    says: str
    typed: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    suggested: Mapping[str, float] = field(default_factory=dict)


_ALL = (
    Ask(
        RESET,
        "Reset reference…",
        "Reset the reference",
        "At the next generation boundary the trainer takes **the policy as it is then** as its new reference, "
        "so KL starts again from zero. This cannot be undone.",
        typed=True,
        labels={"optimizer": "Optimizer state"},
        values={
            "clear": "cleared: a fresh start (ProRL v1)",
            "keep": "kept: momentum carries on (ProRL v2)",
        },
    ),
    Ask(
        "save-checkpoint",
        "Save checkpoint…",
        "Save a checkpoint",
        "At the next boundary the trainer saves a checkpoint, as it would by its own schedule.",
    ),
    Ask(
        "lower-lr",
        "Lower learning rate…",
        "Lower the learning rate",
        "From the next boundary on the learning rate is a **fraction of what the schedule says**. A second command "
        "replaces the first; a fraction of 1 gives the rate back to the schedule.",
        labels={"scale": "Fraction of the schedule", "until": "Until step (empty: for good)"},
        suggested={"scale": 0.3},
    ),
    Ask(
        "set-kl-coef",
        "KL coefficient…",
        "Change the KL coefficient",
        "From the next boundary on the KL term has **this weight** (beta).",
        labels={"value": "KL coefficient"},
    ),
    Ask(
        "pause",
        "Pause…",
        "Pause the training",
        "At the next boundary training waits, holding its GPUs, until somebody resumes or stops it. "
        "It goes on by itself when the time is over. While it waits, other commands are carried out.",
        labels={"minutes": "At most, minutes"},
    ),
    Ask("resume", "Resume…", "Resume the training", "Training goes on where it waits."),
    Ask(
        "stop",
        "Stop…",
        "Stop the training",
        "At the next boundary training **ends**, as if it had reached its last step. Only whoever started it can "
        "start it again.",
        typed=True,
        labels={"save": "Checkpoint"},
        values={
            "yes": "saved first",
            "no": "not saved: what was learnt since the last one is lost",
        },
    ),
)

ASKS: Mapping[str, Ask] = {ask.kind: ask for ask in _ALL}
"""Every command, by its kind."""


def menu(*, paused: bool) -> list[str]:
    """The kinds offered beside the first button, which is the reset or, of a paused run, resume."""
    first = {"resume", "pause"} if paused else {"resume", RESET}
    return [kind for kind in ASKS if kind not in first]
