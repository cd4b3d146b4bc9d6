"""Simulate training runs with small batches: few prompts, data of varying difficulty, rows every 1 to 20 steps,
failures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlwatch.records import ClosedStep

FAILURES = ("noise", "cut", "short", "mismatch", "reward_lost")
"""Kinds of failures. ``noise``: entropy and gradients rise; ``cut``: every answer runs to the length limit; ``short``:
answers shrink; ``mismatch``: log-probs of trainer and rollout engine diverge; ``reward_lost``: only the reward falls.
"""
CADENCES = (1, 4, 5, 10, 20)
"""Numbers of steps between two logged rows."""


@dataclass(frozen=True)
class SmallRun:
    """A simulated run: its rows, the steps between rows, and the failure with the step at which it begins (None:
    sound).
    """

    rows: tuple[ClosedStep, ...]
    every: int
    failure: str = ""
    onset: int | None = None

    @property
    def last_in_time(self) -> int:
        """Last step at which an alarm about the run's failure is still in time.

        It is ten steps after the failure began, or the third row from there on, whichever is later.
        """
        assert self.onset is not None
        after = [row.step for row in self.rows if row.step >= self.onset]
        return max(self.onset + 10, after[min(2, len(after) - 1)] if after else 0)


@dataclass(frozen=True)
class _Setting:
    prompts: int
    answers: int
    memory: int
    hardness: float
    skill: float
    gain: float
    entropy: float
    length: float
    limit: float
    length_of_hard: float
    entropy_of_hard: float


def _setting(noise: random.Random, start: float | None) -> _Setting:
    right = noise.choice((0.15, 0.4, 0.6, 0.85, 0.9)) if start is None else start
    length = noise.choice((120.0, 300.0, 600.0))
    return _Setting(
        prompts=noise.choice((1, 2, 2, 4)),
        answers=noise.choice((4, 8, 8)),
        memory=noise.choice((1, 3, 10)),
        hardness=noise.choice((0.5, 1.0, 1.8)),
        skill=math.log(right / (1.0 - right)),
        gain=noise.uniform(0.0, 1.2),
        entropy=noise.choice((0.3, 0.6, 1.2)),
        length=length,
        limit=length * noise.choice((1.2, 2.0, 4.0)),
        length_of_hard=noise.uniform(0.0, 0.35),
        entropy_of_hard=noise.uniform(0.0, 0.25),
    )


@lru_cache(maxsize=512)
def small_run(seed: int, *, failure: str = "", every: int | None = None, start: float | None = None) -> SmallRun:
    """Simulate a run of 100 to 300 steps with 4 to 32 answers per step; the same ``seed`` gives the same run.

    Hard data lower the reward, lengthen the answers and raise the entropy at once, and stay for up to ten steps: the
    signs of a failure thus coincide in sound runs, too. ``failure``: one of :data:`FAILURES`, complete within ten steps
    of its beginning; ``""``: none. ``every``: steps per row, random if None; a row is the mean over its steps or the
    last of them. ``start``: share of right answers at the beginning, random if None.
    """
    noise = random.Random(seed)
    steps = noise.choice((100, 150, 200, 300))
    drawn = noise.choice(CADENCES)
    cadence = drawn if every is None else every
    setting = _setting(noise, start)
    last_only = noise.random() < 0.4
    onset = noise.randint(int(steps * 0.3), int(steps * 0.8)) if failure else None
    width = noise.choice((3, 6, 10))
    hard, window, rows = 0.0, list[dict[str, float]](), list[ClosedStep]()
    for step in range(1, steps + 1):
        keep = 1.0 - 1.0 / setting.memory
        hard = hard * keep + noise.gauss(0.0, setting.hardness) * math.sqrt(1.0 - keep * keep)
        broken = min(1.0, (step - onset + 1) / width) if onset is not None and step >= onset else 0.0
        window.append(_metrics(noise, setting, (step, steps), hard, (failure, broken)))
        if step % cadence == 0:
            rows.append(ClosedStep(step, window[-1] if last_only else _mean(window), seq=len(rows) + 1))
            window = []
    return SmallRun(tuple(rows), cadence, failure, onset)


def _mean(window: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in window) / len(window) for name in window[0]}


def _metrics(
    noise: random.Random, setting: _Setting, at: tuple[int, int], hard: float, fault: tuple[str, float]
) -> dict[str, float]:
    (step, steps), (failure, broken) = at, fault
    part = step / steps
    right, silent = _rewards(noise, setting, step, hard, broken)
    entropy = setting.entropy * math.exp(-0.4 * part + setting.entropy_of_hard * 0.6 * hard + noise.gauss(0.0, 0.12))
    length = setting.length * math.exp(setting.length_of_hard * hard + noise.gauss(0.0, 0.1) + 0.2 * part)
    length = min(setting.limit, length)
    at_limit = 0.02 + 0.9 / (1.0 + math.exp(-6.0 * (math.log(length / setting.limit) + 0.35))) + noise.gauss(0.0, 0.02)
    cut = min(1.0, max(0.0, at_limit))
    gap = math.exp(noise.gauss(-0.5, 0.35))
    smallest, norm = math.exp(-gap), math.exp(noise.gauss(-1.0, 0.35)) * math.sqrt(1.0 - silent)
    if failure == "noise":
        entropy, norm = entropy * math.exp(2.0 * broken), norm * math.exp(1.5 * broken)
    elif failure == "cut":
        cut, length = cut + (1.0 - cut) * broken, length + (setting.limit - length) * broken
        entropy *= math.exp(0.5 * broken)
    elif failure == "short":
        length, entropy = length * math.exp(-2.0 * broken), entropy * math.exp(-broken)
    elif failure == "mismatch":
        gap, norm = gap * math.exp(1.8 * broken), norm * math.exp(1.2 * broken)
        smallest = math.exp(-gap)
    return {
        "reward/mean": right,
        "reward/zero_std_frac": silent,
        "policy/entropy": entropy,
        "len/mean": length,
        "len/clipped": cut,
        "mismatch/logp_absdiff_max": gap,
        "mismatch/is_ratio_min": smallest,
        "policy/kl_ref": 0.001 * step * math.exp(noise.gauss(0.0, 0.3)),
        "ratio/clipfrac": max(0.0, noise.gauss(0.01, 0.004)),
        "optim/grad_norm": norm,
    }


def _rewards(noise: random.Random, setting: _Setting, step: int, hard: float, broken: float) -> tuple[float, float]:
    """Return the share of right answers in a batch, and the share of its groups with equal rewards."""
    skill = setting.skill + setting.gain * math.log1p(step / 30.0)
    answers, silent = list[bool](), 0
    for _ in range(setting.prompts):
        prompt = hard + noise.gauss(0.0, 0.7 * setting.hardness)
        chance = (1.0 - broken) / (1.0 + math.exp(prompt - skill))
        group = [noise.random() < chance for _ in range(setting.answers)]
        answers += group
        silent += len(set(group)) == 1
    return sum(answers) / len(answers), silent / setting.prompts
