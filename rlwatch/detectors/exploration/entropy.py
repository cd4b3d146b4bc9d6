"""Detect abnormal entropy: a collapse that no rise of reward compensates, and an explosion towards noise."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import DETERMINISTIC, FULL, SOLVED, RunContext
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

CERTAIN = 0.05
"""Entropy, nats per token, below which hardly any token is in doubt, so that a ratio of two entropies means nothing."""


class EntropyDetector(BaseDetector):
    """Base of detectors of token entropy: its level over the last rows compared with the run's beginning, and with the
    reward.

    A subclass defines the level of the beginning, weighs each row (which feeds the three holds), and words the finding.
    ``_moved`` dates it; ``_warned`` and ``_confirmed`` make it a warning and critical.
    """

    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("policy/entropy",),)
    reads: ClassVar[tuple[str, ...]] = ("policy/entropy",)
    shares: ClassVar[tuple[str, ...]] = ("_context",)

    def __init__(self, base: Baseline, now: Window) -> None:
        super().__init__()
        self._context = RunContext()
        self._base = base
        self._first_row: tuple[int, float] | None = None
        self._now = now
        self._moved = Hold(forgive=3)
        self._warned = Hold(forgive=1)
        self._confirmed = Hold(forgive=1)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the median entropy of the last rows (rows: metrics of one step), the newest being ``step``; return a
        finding if it is abnormal.
        """
        entropy = abs(finite(step, *self.reads) or 0.0)
        if self._first_row is None:
            self._first_row = step.step, entropy
        self._base.update(step.step, entropy)
        self._now.update(step.step, entropy)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None:
            return []
        if self._warned.since is None and self.calm(entropy, now, level, first):
            for hold in (self._moved, self._warned, self._confirmed):
                hold.update(step.step, condition=False)
            return []
        start = self.beginning(level, first)
        if start <= 0.0:
            return []
        self.weigh(step, entropy, now, start)
        if not self._warned.lasted(3):
            return []
        severity = Severity.CRITICAL if self._confirmed.lasted(3, 2) else self.mildest(now / start)
        return [self.report(step, now, start, severity)]

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if none has an abnormal entropy, whatever the reward does; otherwise return False.

        Then their median is not abnormal, either.
        """
        base, now, first = self._base, self._now, self._base.first
        level = base.get()
        if not base.done or self._warned.since is not None or now.get() is None or level is None or first is None:
            return False
        values = list(map(abs, rows.column("policy/entropy")))
        if not self.usual(min(*values, now.lowest), max(*values, now.most), level, first, self._most_noise(rows)):
            return False
        now.extend(rows.steps, values)
        for hold in (self._moved, self._warned, self._confirmed):
            hold.miss(rows.steps)
        return True

    def _most_noise(self, rows: Stretch) -> float:
        """Return the largest entropy of uniform noise, in nats, that is or becomes known; 0 if none."""
        vocabulary = max(rows.column("policy/vocab_size"), default=0.0)
        return max(self._context.log_vocab or 0.0, math.log(max(vocabulary, 1.0)))

    @abstractmethod
    def usual(self, lowest: float, highest: float, level: float, first: float, noise: float) -> bool:
        """Return True if entropies from ``lowest`` to ``highest`` are certainly not abnormal.

        All in nats per token: ``level`` of the warm-up, ``first`` of the very first rows, and ``noise``, the entropy of
        uniform noise, 0 if unknown.
        """

    def mildest(self, ratio: float) -> Severity:  # noqa: ARG002
        """Return the severity of a finding that is not critical; ``ratio``: entropy now over its start."""
        return Severity.WARNING

    def calm(self, entropy: float, now: float, level: float, first: float) -> bool:  # noqa: ARG002
        """Return True if the row cannot count as abnormal whatever the reward does, so that the reward need not be
        judged.

        All arguments are entropies in nats per token: ``entropy`` of this row, ``now`` of the last rows, ``level`` of
        the warm-up, and ``first`` of the very first rows.
        """
        return False

    @abstractmethod
    def beginning(self, level: float, first: float) -> float:
        """Return the entropy, in nats per token, that the run is compared with.

        ``level``: entropy of the warm-up. ``first``: entropy of the very first rows.
        """

    @abstractmethod
    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """Record whether the row ``step`` shows an abnormal entropy, one that warns, and one that is critical.

        All in nats per token: ``entropy`` of the row, ``now`` of the last rows, and ``start``, with which they are
        compared.
        """

    @abstractmethod
    def report(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """Return the finding about the entropy, made at the row ``step``.

        ``now``: entropy of the last rows. ``start``: entropy at the beginning. Both are in nats per token.
        """

    @property
    def onset(self) -> int | None:
        """Step since which single rows, or otherwise their median, are abnormal; None if they are not."""
        return self._warned.since if self._moved.since is None else self._moved.since


# Entropy collapse: the policy stops exploring and the reward does not pay for it.

LOW = 0.5
"""Ratio of entropy to its start below which a decline is dated, unless the reward rose with it."""
WARN, WARN_BAD = 0.15, 0.4
"""Ratios of entropy to its start that warn: by itself, and with a fallen reward or groups without reward variance."""
CRITICAL, CRITICAL_BAD = 0.02, 0.2
"""The same ratios for critical. Healthy runs fall to 0.15-0.3 of their start while the reward rises."""
SETTLED = 20
"""Steps in which a format is learnt, which takes most of the entropy of the first row and is rewarded within them."""
PAID = 0.05
"""Ratio of entropy to its start that warns even while the reward rises: no entropy is left to spend."""


class EntropyCollapse(EntropyDetector):
    """Detector of an entropy collapse: token entropy far below how the run began.

    It is corroborated by the reward, the share of groups with equal rewards, and the gradient. Entropy spent on reward
    is the normal course of RLVR (R = -a exp(H) + b, arXiv 2505.22617), so a low level alone is no finding while the
    reward is above its start.
    """

    name: ClassVar[str] = "entropy_collapse"

    def __init__(self) -> None:
        super().__init__(Baseline(), Window(rows=10, steps=10))

    def usual(self, lowest: float, highest: float, level: float, first: float, noise: float) -> bool:  # noqa: ARG002
        """Return True if entropies from ``lowest`` to ``highest`` are above all levels that may count as a collapse.

        All in nats per token: ``level`` of the warm-up, ``first`` of the very first rows, and ``noise``, the entropy of
        uniform noise, 0 if unknown.
        """
        began = max(level, first, 0.0 if self._first_row is None else self._first_row[1])
        return max(level, first) > 0.0 and lowest >= LOW * began and lowest > DETERMINISTIC * noise

    def calm(self, entropy: float, now: float, level: float, first: float) -> bool:
        """Return True if the entropy is above every level that could count as a collapse, against the highest possible
        beginning.

        All arguments are entropies in nats per token: ``entropy`` of this row, ``now`` of the last rows, ``level`` of
        the warm-up, and ``first`` of the very first rows.
        """
        least = max(level, first)
        highest = least if self._first_row is None else max(least, self._first_row[1])
        if least <= 0.0 or entropy < LOW * highest or now / highest < WARN_BAD:
            return False
        log_vocab = self._context.log_vocab
        return log_vocab is None or now >= DETERMINISTIC * log_vocab

    def beginning(self, level: float, first: float) -> float:
        """Return the higher level (nats/token), so that a run that falls during its warm-up is compared with its first
        rows.

        One step can be enough to collapse. So the very first row, before any update, counts as well if the reward has
        not risen since, until it had time to, or if hardly any token is in doubt.
        """
        return max(level, first, self._very_first())

    def _very_first(self) -> float:
        now, last = self._now.get(), self._now.last
        if self._first_row is None or now is None or last is None or self._context.reward.risen():
            return 0.0
        began, entropy = self._first_row
        return entropy if now < CERTAIN or last - began >= SETTLED else 0.0

    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """Record whether the row ``step`` shows a fall of entropy, one deep enough to warn, and one that is critical.

        The fall must be deeper if the reward rose with it; less is enough if the reward fell or nothing is learnt. All
        in nats per token: ``entropy`` of the row, ``now`` of the last rows, and ``start``, with which they are
        compared.
        """
        ratio = now / start
        self._moved.update(step.step, entropy < LOW * start and not self._pays(step))
        bad = self._corroborated()
        reward = self._context.reward
        paid = not bad and (reward.risen() or reward.holds(FULL))
        self._warned.update(step.step, ratio < (PAID if paid else WARN_BAD if bad else WARN))
        self._confirmed.update(step.step, not paid and self._critical(now, ratio, bad))

    def mildest(self, ratio: float) -> Severity:
        """Return ``info`` if the reward is near its full value, as in a solved task, else a warning.

        Below a fiftieth of the entropy, ``info`` requires that hardly anything is left to gain.
        """
        reward = self._context.reward
        bought = reward.near_full() if ratio >= CRITICAL else reward.holds(FULL)
        return Severity.INFO if bought else Severity.WARNING

    def _corroborated(self) -> bool:
        """Return whether the reward fell, or hardly anything is learnt and no good reward explains it."""
        context, reward = self._context, self._context.reward
        return reward.fallen() or (context.mute() and not reward.risen() and not reward.holds(SOLVED))

    def _pays(self, step: ClosedStep) -> bool:
        """Return whether this row still earns more than the start: the entropy spent so far was not lost."""
        reward, value = self._context.reward, finite(step, "reward/mean")
        return reward.risen() and not (value is not None and reward.low(value))

    def _critical(self, now: float, ratio: float, bad: bool) -> bool:
        if ratio < (CRITICAL_BAD if bad else CRITICAL):
            return True
        return bad and self._context.log_vocab is not None and now < DETERMINISTIC * self._context.log_vocab

    def report(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """Return the finding at the row ``step``: the depth of the fall, the steps it took, and the course of the
        reward.

        ``now``: entropy of the last rows. ``start``: entropy at the beginning. Both are in nats per token.
        """
        onset = self.onset
        span = 0 if onset is None else step.step - onset
        reward = self._context.reward
        message = f"entropy fell from {number(start)} to {number(now)} nats/token over {span} steps{reward.in_words()}"
        if self._context.mute():
            message += "; nearly all groups have zero reward variance, so no gradient restores it"
        evidence = rounded(
            {
                "entropy": now,
                "entropy_baseline": start,
                "ratio": now / start,
                "reward": reward.now,
                "reward_best": reward.best,
                "silent_share": self._context.silent,
                "grad_ratio": self._context.grad_ratio,
            }
        )
        return self.finding(
            step,
            "entropy_collapse",
            severity,
            message,
            onset=onset,
            metric="policy/entropy",
            score=WARN_BAD * start / max(now, 1e-12),
            baseline=start,
            evidence=evidence,
        )


# Entropy explosion: the policy drifts towards noise while the reward falls.

RISE = 1.3
"""Ratio of entropy to its start above which a rise is dated."""
NEARLY = 0.99
"""Factor on a limit of the entropy: values below the product are below the limit whatever the rounding."""
RISEN_WARN, RISEN_CRITICAL = 1.5, 2.0
"""Ratios that warn and are critical with a fallen reward (a wrong entropy bonus was seen at 1.35-1.8 when it fell)."""
ALONE = 3.0
"""Ratio of entropy to its start that warns by itself if the reward has not risen."""
NOISE = 0.7
"""Share of log V beyond which output is close to uniform noise."""


class EntropyExplosion(EntropyDetector):
    """Detector of an entropy explosion: token entropy above how the run began, with a falling reward or close to log
    V.
    """

    name: ClassVar[str] = "entropy_explosion"

    def __init__(self) -> None:
        super().__init__(Baseline(floor=0.02), Window(rows=8, steps=8))

    def usual(self, lowest: float, highest: float, level: float, first: float, noise: float) -> bool:  # noqa: ARG002
        """Return True if entropies from ``lowest`` to ``highest`` are below the least level that counts as a rise.

        All in nats per token: ``level`` of the warm-up, ``first`` of the very first rows; ``noise`` is not used.
        """
        return 0.0 < highest < NEARLY * RISE * self.beginning(level, first)

    def beginning(self, level: float, first: float) -> float:
        """Return the lower level (nats/token), at least ``CERTAIN``, so that a rise during the warm-up is noticed."""
        least = min(level, first)
        return max(least, CERTAIN) if least > 0.0 else 0.0

    def weigh(self, step: ClosedStep, entropy: float, now: float, start: float) -> None:
        """Record whether the row ``step`` shows a rise of entropy, one that warns, and one that is critical.

        A rise warns if the reward fell with it, if it is large by itself, or if the output is close to uniform noise.
        All in nats per token: ``entropy`` of the row, ``now`` of the last rows, and ``start``, with which they are
        compared.
        """
        ratio = now / start
        self._moved.update(step.step, entropy > RISE * start)
        reward, log_vocab = self._context.reward, self._context.log_vocab
        fallen = reward.fallen()
        noise = log_vocab is not None and now > NOISE * log_vocab and ratio > RISE
        alone = ratio > ALONE and not reward.risen()
        self._warned.update(step.step, (fallen and ratio > RISEN_WARN) or alone or noise)
        self._confirmed.update(step.step, fallen and (ratio > RISEN_CRITICAL or noise))

    def report(self, step: ClosedStep, now: float, start: float, severity: Severity) -> Finding:
        """Return the finding at the row ``step``: the height of the rise, its distance from noise, and the course of
        the reward.

        ``now``: entropy of the last rows. ``start``: entropy at the beginning. Both are in nats per token.
        """
        reward = self._context.reward
        ceiling = (
            "" if self._context.log_vocab is None else f" (uniform noise would be {number(self._context.log_vocab)})"
        )
        message = f"entropy rose from {number(start)} to {number(now)} nats/token{ceiling}{reward.in_words()}"
        return self.finding(
            step,
            "entropy_explosion",
            severity,
            message,
            onset=self.onset,
            metric="policy/entropy",
            score=now / (RISEN_WARN * start),
            baseline=start,
            evidence=rounded(
                {
                    "entropy": now,
                    "entropy_baseline": start,
                    "ratio": now / start,
                    "log_vocab": self._context.log_vocab,
                    "reward": reward.now,
                    "reward_best": reward.best,
                }
            ),
        )
