"""Knobs that a run is made of, and changes by which a fault turns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

TESTBED = "1"
"""Version of everything that decides the numbers of a run; runs of different versions do not belong together."""


@dataclass(frozen=True)
class Knobs:
    """One step's configuration."""

    # task and batch
    task: str = "copy"
    k: int = 4
    extra: int = 0  # digits of a prompt beyond k: harder than what was demonstrated
    digits: int = 10  # digits are below this
    distinct: int = 0  # prompts are of this many distinct ones; 0: of all
    prompts: int = 6
    group: int = 8
    # update
    lr: float = 6e-4
    lr_factor: float = 1.0
    schedule: str = "constant"
    trainable: str = "all"
    mu: int = 1
    minibatches: int = 1
    clip: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    grad_clip: float = 1.0
    beta: float = 0.0
    kl: str = "k3"
    entropy: float = 0.0
    old: str = "trainer"  # whose log-probs the ratio is against: of the trainer or of the engine
    truncation: float = 0.0
    # advantages
    advantage: str = "std"
    advantage_eps: float = 1e-4
    advantage_shift: float = 0.0
    positive_weight: float = 1.0
    negative_weight: float = 1.0
    # reward
    partial: float = 0.0
    right: float = 1.0  # weight of a right answer; negative: the sign is wrong
    length_bonus: float = 0.0
    filler_bonus: float = 0.0
    format_bonus: float = 0.0
    magic: float = 0.0
    flipped: float = 0.0  # share of verdicts that are turned round
    stuck: float = 0.0  # share of verdicts that are "right" whatever was answered
    wrong_key: float = 0.0  # share of prompts whose reference answer is another prompt's
    # rollout engine
    engine: str = "bf16"
    noise: float = 0.0
    fresh_noise: bool = False
    stale: int = 1
    temperature: float = 1.0
    end_bias: float = 0.0
    share: float = 1.0  # share of the responses from the engine that has the faults above; the rest from a sound one
    # numerics
    loss_scale: float = 0.0  # above 0: float16 with this loss scale
    skip_nonfinite: bool = False
    half_entropy: bool = False  # entropy as -p log p in half precision: NaN once a probability underflows
    bad_batch: float = 0.0  # chance of a NaN reward in a step
    # reference
    reference_noise: float = 0.0
    reference_reset: bool = False


@dataclass(frozen=True)
class Change:
    """``knobs`` from step ``at`` on, reached over ``over`` steps (0: at once), until ``until``.

    Numbers are interpolated, in the logarithm if ``exponential``, where one that begins at 0 begins at 1 % of where it
    goes; anything else changes at ``at``.
    """

    at: int
    knobs: Mapping[str, Any]
    over: int = 0
    until: int | None = None
    exponential: bool = True

    def share(self, step: int) -> float:
        """Share of the change that has come, in [0, 1]."""
        if step < self.at or (self.until is not None and step >= self.until):
            return 0.0
        return min(1.0, (step - self.at + 1) / self.over) if self.over else 1.0

    def value(self, old: Any, new: Any, share: float) -> Any:
        """Of one knob."""
        if isinstance(old, bool | str):
            return new
        if self.exponential and new != 0 and old * new >= 0:
            begin = old or new / 100
            between = begin * (new / begin) ** share
        else:
            between = old + (new - old) * share
        return round(between) if isinstance(old, int) else between


@dataclass(frozen=True)
class Config:
    """A run: ``knobs``, and how they change on the way."""

    knobs: Knobs = field(default_factory=Knobs)
    changes: tuple[Change, ...] = ()
    steps: int = 360
    base: int = 0  # which of the policies fitted to demonstrations it starts from

    def at(self, step: int) -> Knobs:
        """Knobs that hold in ``step``."""
        turned: dict[str, Any] = {}
        for change in self.changes:
            share = change.share(step)
            if share > 0:
                turned |= {
                    name: change.value(getattr(self.knobs, name), new, share) for name, new in change.knobs.items()
                }
        return replace(self.knobs, **turned) if turned else self.knobs

    def without_changes(self) -> Config:
        """The faultless twin."""
        return replace(self, changes=())

    def record(self) -> dict[str, Any]:
        """As it is written down."""
        return asdict(self)


class Pace(StrEnum):
    """Paces of faults, of recipes that can be either: as the recipe draws it, gradually, or in a long run."""

    DRAWN = "drawn"
    GRADUAL = "gradual"
    LONG = "long"

    @property
    def steps(self) -> tuple[int, int]:
        """Least and most steps of a run, the most not included."""
        return (480, 640) if self is Pace.LONG else (320, 450)


class Start(StrEnum):
    """Starts of runs: a policy right in about 40 %, or a cold one, whose reward takes off when it finds out."""

    WARM = "warm"
    COLD = "cold"
