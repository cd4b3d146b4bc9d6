"""Detect that the reward rises while other evidence shows that the policy has not improved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import StatisticsError, correlation, median_low
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, members, rounded
from rlwatch.detectors.context import Change, RewardWatch, noise_of
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold, Window
from rlwatch.wording import number

HELD_OUT_FALL = 0.1
"""Share of its best level that a held-out score must have lost to count as fallen."""
LOST = 0.25
"""The same share if all of its last ``STALL`` values are below the best: the noise of few evaluations is uncertain."""
HELD_OUT_GAIN = 0.25
"""Gain of a held-out score, as a share of its first value, that rules out that the reward is won by length."""
STALL = 6
"""Evaluations without a better level that make a stall."""
TOGETHER, IN_STEP = 60, 0.7
"""Number of rows over which length and reward are correlated, and the correlation from which they rise together."""
CLIMB = 3.0
"""A climb must gain this multiple of the noise of a row."""
PART = 0.2
"""Share of a climb that each half of it must have: a single jump is no climb."""
LONGER, MUCH_LONGER = 2.0, 2.5
"""Response length over its start that is a moderate sign, and that is a strong one."""
STRONG, MODERATE, WEAK = 3, 2, 1
"""Weights of signs: a second measure of the same quantity; a feature that no good answer needs; one that learning also
brings.
"""


@dataclass(frozen=True, slots=True)
class HackingSignal:
    """One observation that contradicts a better policy: its text, its weight, and the metric it was read from."""

    text: str
    weight: int
    metric: str


@dataclass(frozen=True, slots=True)
class Proxy:
    """A metric that contradicts a rising reward at ``factor`` times its start and at least ``floor``.

    A factor below 1 means a fall, from a start above ``floor``. ``weight`` and ``text``: of the sign that it gives.
    """

    metric: str
    factor: float
    floor: float
    weight: int
    text: str

    def holds(self, change: Change) -> bool:
        """Return True if the metric is beyond its bound now; ``change``: the metric's level at the start and now."""
        now, start = change.now, change.start
        if now is None or start is None:
            return False
        limit = self.factor * start
        beyond = now >= max(self.floor, limit) if self.factor > 1.0 else start > self.floor and now <= limit
        return beyond and change.moved

    def may_hold(self, change: Change, lowest: float, highest: float) -> bool:
        """Return True unless the metric is certainly within its bound while its level is from ``lowest`` to
        ``highest``.

        ``change``: the metric's level at the start and now.
        """
        start = change.start
        if start is None:
            return True
        limit = self.factor * start
        return highest >= max(self.floor, limit) if self.factor > 1.0 else start > self.floor and lowest <= limit


PROXIES = (
    Proxy("text/looping_frac", 3.0, 0.1, MODERATE, "responses loop"),
    Proxy("text/repetition", 2.0, 0.4, MODERATE, "responses repeat themselves"),
    Proxy("text/garbled", 5.0, 0.02, MODERATE, "responses are garbled"),
    Proxy("len/mean", 0.25, 0.0, MODERATE, "responses are less than a quarter as long"),
    Proxy("len/mean", 3.0, 0.0, WEAK, "responses are three times as long"),
    Proxy("len/clipped", 2.0, 0.5, WEAK, "most responses are cut at the limit"),
    Proxy("policy/entropy", 0.05, 0.0, WEAK, "the policy is nearly deterministic"),
    Proxy("reward/zero_std_frac", 2.0, 0.8, WEAK, "nearly all groups agree"),
    Proxy("reward/unique_answers", 0.4, 0.0, WEAK, "groups give few distinct answers"),
    Proxy("policy/kl_ref", 20.0, 1.0, WEAK, "the policy is far from its reference"),
)
NAMES = tuple(dict.fromkeys(proxy.metric for proxy in PROXIES))


class Together:
    """Mean length and reward of the same rows, to detect a reward that is won by length.

    If longer answers are needed, length grows with the reward too. Row by row, however, the longer batch is then not
    the better one, because harder questions need longer answers.
    """

    def __init__(self) -> None:
        self._length, self._reward = (Window(rows=TOGETHER, steps=10 * TOGETHER, least=TOGETHER // 2) for _ in range(2))
        self._climbed = Hold(forgive=TOGETHER // 2)

    def update(self, step: ClosedStep, *, longer: bool) -> None:
        """Read mean length and reward of the row ``step``, if it has both.

        ``longer``: True if responses are longer than at the start; otherwise length cannot explain the reward.
        """
        length, reward = finite(step, "len/mean"), finite(step, "reward/mean")
        if length is not None and reward is not None:
            self._length.update(step.step, length)
            self._reward.update(step.step, reward)
            self._climbed.update(step.step, longer and self._climb())

    def pass_over(self, rows: Stretch) -> None:
        """Read mean length and reward of all ``rows`` at once; responses must be no longer than at the start in each of
        them.
        """
        length, reward = rows.column("len/mean"), rows.column("reward/mean")
        if length and reward:
            self._length.extend(rows.steps, length)
            self._reward.extend(rows.steps, reward)
            self._climbed.miss(rows.steps)

    @property
    def climbed(self) -> bool:
        """True if length and reward have risen in step over the rows before this one, or recently."""
        return self._climbed.rows > 0

    def _climb(self) -> bool:
        """Return whether both rise in step over the last rows: in each third of them, with a high correlation."""
        length, reward = self._length.values, self._reward.values
        if len(length) < self._length.least or not (_climbs(length) and _climbs(reward)):
            return False
        try:
            return correlation(length, reward) >= IN_STEP
        except StatisticsError:
            return False


def _climbs(values: list[float]) -> bool:
    """Return whether the medians of the thirds rise by more than noise, and neither of the two steps dominates."""
    third = len(values) // 3
    low, middle, high = map(median_low, (values[:third], values[third:-third], values[-third:]))
    if high - low <= CLIMB * noise_of(values):
        return False
    return PART * (high - low) <= middle - low <= (1.0 - PART) * (high - low)


class Signs:
    """All signs against a run's reward: the proxies and every held-out score."""

    def __init__(self) -> None:
        self._together = Together()
        self._changes = {name: Change() for name in NAMES}
        self._seen: set[str] = set()
        """Names of measured metrics."""
        self._scores: dict[str, HeldOut] = {}

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if no sign can hold in them; otherwise change nothing and return False.

        They must have no held-out scores, and no metric may be beyond its bound.
        """
        there = {name: self._changes[name] for name in NAMES if name in rows.metrics}
        if self._scores or held_out(rows.rows[0]) or any(name not in there for name in self._seen):
            return False
        spans = {name: change.span(rows.column(name)) for name, change in there.items()}
        if any(proxy.may_hold(there[proxy.metric], *spans[proxy.metric]) for proxy in PROXIES if proxy.metric in there):
            return False
        if "len/mean" in there and spans["len/mean"][1] >= LONGER * max(there["len/mean"].start or 0.0, 0.0):
            return False
        self._seen.update(there)
        for name, change in there.items():
            change.extend(rows.steps, rows.column(name))
        self._together.pass_over(rows)
        return True

    def update(self, step: ClosedStep, reward: float | None) -> None:
        """Read a row for signs that contradict a better policy; ``reward``: level of the training reward, None if
        unknown.
        """
        numbers = step.numbers
        for name, change in self._changes.items():
            value = numbers.get(name)
            if value is not None:
                self._seen.add(name)
                change.update(step.step, value)
        self._together.update(step, longer=self._changes["len/mean"].share >= LONGER)
        for name in held_out(step):
            value = finite(step, name)
            if value is not None and name not in self._scores and len(self._scores) < 8:
                self._scores[name] = HeldOut()
            if value is not None and name in self._scores:
                self._scores[name].update(step.step, value, reward)

    def now(self) -> list[HackingSignal]:
        """Return the observations that contradict the rise of the reward now, the heaviest first."""
        found = [
            *self._scored(),
            *self._by_length(),
            *(
                HackingSignal(p.text, p.weight, p.metric)
                for p in PROXIES
                if p.metric in self._seen and p.holds(self._changes[p.metric])
            ),
        ]
        return sorted(found, key=lambda sign: -sign.weight)

    def _by_length(self) -> Iterator[HackingSignal]:
        times = self._changes["len/mean"].share
        if times < LONGER or not self._together.climbed or any(score.rises for score in self._scores.values()):
            return
        text = f"it rises in step with the length of responses, which are {times:.1f} times as long"
        yield HackingSignal(text, STRONG if times >= MUCH_LONGER else MODERATE, "len/mean")

    def _scored(self) -> Iterator[HackingSignal]:
        for name, score in self._scores.items():
            if score.fell:
                yield HackingSignal(
                    f"the held-out score {name} fell from {score.best:.3g} to {score.now:.3g}", STRONG, name
                )
            elif score.stalls:
                yield HackingSignal(f"the held-out score {name} does not improve ({score.now:.3g})", WEAK, name)


class HeldOut:
    """A held-out score, measured now and then, and how the training reward changed since the score's best."""

    def __init__(self) -> None:
        self._watch = RewardWatch()
        self._first: float | None = None
        self._highest = -math.inf
        self._last = deque[float](maxlen=3)
        self._reward: float | None = None
        self._reward_then: float | None = None
        self._best: float | None = None
        self._since = 0

    def update(self, step: int, value: float, reward: float | None) -> None:
        """Read an evaluation's score at a step; ``reward``: the level of the training reward, None if unknown."""
        self._watch.take(step, value)
        self._first = value if self._first is None else self._first
        self._highest = max(self._highest, value)
        self._last.append(value)
        self._reward = reward
        self._since += 1
        best = self._watch.best
        if best is not None and (self._best is None or best > self._best):
            self._best, self._reward_then, self._since = best, reward, 0

    @property
    def best(self) -> float:
        """Best level of the held-out score so far; 0 if unknown."""
        return self._best or 0.0

    @property
    def now(self) -> float:
        """Level of the held-out score over its last evaluations; 0 if unknown."""
        return self._watch.now or 0.0

    @property
    def rises(self) -> bool:
        """True if the last held-out scores are clearly above the first and near the highest."""
        if self._first is None:
            return False
        now = median_low(self._last)
        return now > self._first + HELD_OUT_GAIN * abs(self._first) and now >= (1.0 - HELD_OUT_FALL) * self._highest

    @property
    def _paid(self) -> bool:
        """Return whether the training reward has not fallen since the best score."""
        return self._reward is not None and self._reward_then is not None and self._reward >= self._reward_then

    @property
    def fell(self) -> bool:
        """True if the score fell under a training reward that did not fall.

        That is a tenth below its best, beyond its noise; or, with any noise, a quarter below it in as many evaluations
        as make a stall.
        """
        lost = self._since >= STALL and self.now <= (1.0 - LOST) * self.best
        return self._paid and (self._watch.fallen(HELD_OUT_FALL) or (lost and self.best > 0.0))

    @property
    def stalls(self) -> bool:
        """True if six evaluations brought no better level, under a training reward that did not fall."""
        return self._paid and self._since >= STALL


def held_out(step: ClosedStep) -> list[str]:
    """Return the metric names in the row ``step`` that are held-out scores: their means, not their spreads."""
    named = members(step, "val")
    return [
        name for name in named if name == "val/score" or (name.startswith("val-core/") and not name.endswith("/std"))
    ]


ENOUGH = 2
"""Total weight of the signs from which a finding is reported: one weak sign also accompanies learning."""
MUCH = 5
"""Total weight from which it is a warning without a held-out score."""
MOST = 3
"""Most signs that the message lists."""
ROWS, STEPS = 5, 20
"""Rows and steps for which the signs must last together."""


class RewardHacking(BaseDetector):
    """Detector of a gamed reward: it is clearly above its start, against held-out scores and features of the answers.

    The finding is a suspicion with its confidence: ``hint`` (info), or ``likely`` (warning: a held-out score fell, or
    many signs of two kinds). It is never critical: such signs explain a failure afterwards, but as an early warning
    they bring many false alarms. A person has to read completions.
    """

    name: ClassVar[str] = "reward_hacking"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("reward/mean", name) for name in ("val/score", "val-core/", *NAMES)
    )
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._signs = Signs()
        self._lasting = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read reward, held-out scores and proxies from the row ``step``; evaluations arrive on rows without the other
        metrics.
        """
        self._reward.update(step)
        self._signs.update(step, self._reward.now)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if no sign of reward hacking can hold in them, whatever the reward does; else
        return False.
        """
        taken = self._signs.pass_over(rows)
        if taken:
            self._lasting.miss(rows.steps)
        return taken

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Weigh the signs of reward hacking against the rise of the reward; return the suspicion as a finding if they
        suffice.
        """
        signs = self._signs.now() if self._reward.above else []
        weight = sum(sign.weight for sign in signs)
        # Testing whether the reward has risen is expensive, so it is skipped where there is too little evidence.
        doubted = weight >= ENOUGH or self._lasting.since is not None
        if doubted and not (self._reward.risen() and not self._reward.fallen()):
            signs, weight = [], 0
        self._lasting.update(step.step, weight >= ENOUGH)
        if not self._lasting.lasted(ROWS, STEPS) or not signs:
            return []
        return [self._finding(step, signs, weight)]

    def _finding(self, step: ClosedStep, signs: list[HackingSignal], weight: int) -> Finding:
        strongest = signs[0].weight
        likely = strongest >= STRONG or (weight >= MUCH and strongest >= MODERATE)
        sure = "likely" if likely else "hint"
        how = "likely" if likely else "only a hint"
        reward = self._reward
        return self.finding(
            step,
            "reward_hacking",
            Severity.WARNING if likely else Severity.INFO,
            f"reward rose from {number(reward.start or 0.0)} to {number(reward.now or 0.0)}, but "
            f"{'; '.join(sign.text for sign in signs[:MOST])}: the reward may be gamed ({how})",
            onset=self._lasting.since,
            metric="reward/mean",
            score=weight / ENOUGH,
            baseline=reward.start,
            evidence=rounded({"reward": reward.now, "reward_start": reward.start, "weight": weight})
            | {"sure": sure, "signs": [sign.metric for sign in signs]},
        )
