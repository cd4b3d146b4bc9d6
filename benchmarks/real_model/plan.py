"""Which runs are made, and in which order: the first dozen has every fault and every task once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Fault(StrEnum):
    """What goes wrong from ``Run.begins`` on."""

    NONE = "healthy"
    RATE = "learning rate x 30"
    RAMP = "learning rate ramp to x 30"
    STALE = "stale sampler"
    TOP_P = "top_p 0.8, not corrected"
    PADDING = "overflow at padding"
    FLIPPED = "reward flipped"
    FULL_MARKS = "verifier gives full marks"
    ENTROPY = "entropy bonus"


CAUSES = {
    Fault.RATE: ("learning_rate",),
    Fault.RAMP: ("learning_rate",),
    Fault.STALE: ("weight_sync", "rollout_engine"),
    Fault.TOP_P: ("rollout_engine",),
    Fault.PADDING: ("numerics", "old_logp"),
    Fault.FLIPPED: ("reward_function",),
    Fault.FULL_MARKS: ("reward_function",),
    Fault.ENTROPY: ("entropy_bonus",),
}
"""Knobs of the catalogue that name the fault."""


@dataclass(frozen=True)
class Size:
    """What a device can do."""

    answers: int
    longest: int
    steps: int
    begins: int
    sums: str
    rate: float = 2e-5
    group: int = 8


SIZES = {
    "cpu": Size(answers=16, longest=12, steps=60, begins=25, sums="digits"),
    "cuda": Size(answers=64, longest=16, steps=80, begins=36, sums="sums"),
}
QUICK = Size(answers=4, longest=6, steps=5, begins=3, sums="digits", group=2)
"""Shows that it runs, and no figure."""


def size_of(device: str, *, quick: bool) -> Size:
    """Of the runs on ``device``."""
    return QUICK if quick else SIZES[device]


@dataclass(frozen=True)
class Run:
    """One training. ``engine``: a sampler apart from the trainer draws, and its log-probs are recorded."""

    fault: Fault
    task: str
    seed: int = 1
    engine: bool = False
    corrected: bool = False

    @property
    def name(self) -> str:
        """Of its files."""
        words = [self.fault.name.lower().replace("_", "-"), self.task, *(["engine"] if self.engine else [])]
        return "-".join([*words, str(self.seed)]).replace("none", "healthy")


def plan(size: Size) -> list[Run]:
    """All runs, the most telling first."""
    sums, plain = size.sums, (Fault.RATE, Fault.FLIPPED, Fault.FULL_MARKS, Fault.ENTROPY, Fault.RAMP)
    first = [
        Run(Fault.NONE, sums),
        Run(Fault.RATE, sums),
        Run(Fault.PADDING, sums, engine=True, corrected=True),
        Run(Fault.FLIPPED, sums),
        Run(Fault.FULL_MARKS, sums),
        Run(Fault.ENTROPY, sums),
        Run(Fault.RAMP, sums),
        Run(Fault.STALE, sums, engine=True),
        Run(Fault.TOP_P, sums, engine=True),
        Run(Fault.NONE, sums, engine=True),
        Run(Fault.NONE, "larger"),
        Run(Fault.NONE, "letter"),
    ]
    more = [Run(fault, task) for task in ("larger", "letter") for fault in plain]
    again = [replace(run, seed=2) for run in first]
    return first + more + again
