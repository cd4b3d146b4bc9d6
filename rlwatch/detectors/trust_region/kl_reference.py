"""Detect KL to the reference that grows without bound, or is flat at a high level, where a reset may be due (ProRL).

In reading order: held-out scores, signs that speak against a reset, the flat half, and growth.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

from rlwatch.catalogue import collapse_kinds, detector_class, kinds
from rlwatch.detectors.base import BaseDetector, Stretch, finite, members, reading, rounded
from rlwatch.detectors.context import MEDIAN_ERROR, NORMAL_80, RunContext, noise_of
from rlwatch.ports import Detector
from rlwatch.records import ClosedStep, Event, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window, mad, median, quantile, theil_sen
from rlwatch.wording import number

SCORE, SETS = "val/score", "val-core/"
"""Metric of one held-out score, or prefix of those of several held-out sets under the trainer's own names."""
LEAST = 6
"""Fewest evaluations before anything is reported."""
SINCE = 4
"""Evaluations since the best one that make a gap: fewer are chance."""
SURE = 2.0
"""Deviations of one score that the gap to the second best must have; the best of many is always partly luck."""
VISIBLE = 0.01
"""Share of the best held-out score below which a fall from it is ignored."""
FLAT = 0.25
"""Share of the score's range that a rise since the best must reach to count."""
MOST = 1e9


class Validation:
    """Mean of the held-out scores of a run, one point per evaluation, and its course since the best."""

    def __init__(self) -> None:
        self._scores = Window(rows=40, steps=10**9)
        self._best: float | None = None
        self._best_step = 0
        self._since = 0
        self._low = MOST

    def update(self, step: ClosedStep) -> None:
        """Read the held-out score of the row ``step``, if it has one."""
        score = _read(step)
        if score is None:
            return
        self._scores.update(step.step, score)
        self._low = min(self._low, score)
        if self._best is None or score > self._best:
            self._best, self._best_step, self._since = score, step.step, 0
        else:
            self._since += 1

    @property
    def now(self) -> float | None:
        """Median of the last three held-out scores; None if there are fewer."""
        return median(self._scores.values[-3:]) if len(self._scores) >= 3 else None

    @property
    def best(self) -> float | None:
        """Highest held-out score so far; None if there is none."""
        return self._best

    @property
    def best_step(self) -> int:
        """Training step of the best held-out score."""
        return self._best_step

    @property
    def known(self) -> bool:
        """True if there are enough evaluations on held-out data for a trend."""
        return len(self._scores) >= LEAST

    def stalls(self) -> bool:
        """Return True if the held-out score ended its improvement: it is below its second best and has no upward trend.

        At least ``SINCE`` evaluations must have followed the best one.
        """
        now, best = self.now, self._best
        if not self.known or now is None or best is None or self._since < SINCE:
            return False
        second = sorted(self._scores.values)[-2]
        if second - now <= max(SURE * self._noise(), VISIBLE * abs(best)):
            return False
        return self._rise() <= FLAT * max(best - self._low, mad(self._scores.values))

    def rises(self) -> bool:
        """Return True if the held-out score is still improving: a recent best, and an upward trend."""
        return self.known and self._since < SINCE and self._rise() > 0.0

    @property
    def _rows(self) -> int:
        """Return the number of evaluations from the best one on, at least ``LEAST``."""
        return max(self._since + 1, LEAST)

    def _noise(self) -> float:
        """Return the standard deviation of one score, from the jumps since the best one."""
        jumps = [abs(b - a) for a, b in pairwise(self._scores.values[-self._since - 1 :])]
        return quantile(jumps, 0.8) / (NORMAL_80 * math.sqrt(2.0)) if jumps else 0.0

    def _rise(self) -> float:
        """Return the change of the score from the best evaluation on, by its robust trend."""
        at, values = self._scores.at[-self._rows :], self._scores.values[-self._rows :]
        return theil_sen(at, values) * (at[-1] - at[0])


def _read(step: ClosedStep) -> float | None:
    score = finite(step, SCORE)
    if score is None:
        scores = [value for name in members(step, SETS) if (value := finite(step, name)) is not None]
        score = sum(scores) / len(scores) if scores else None
    return None if score is None else min(max(score, -MOST), MOST)


# What rules out a reset of the reference: it would make the policy of a collapse the anchor.

GARBLED = (("text/garbled", 0.1), ("text/id0_frac", 0.05), ("text/replacement", 0.1))
"""Shares of the output from which it is not language any more, by metric."""
ROWS = 20
"""Rows for which a sign of collapse rules out a reset."""


class Vetoes:
    """Signs of collapse that rule out a reset of the reference, as it would make the collapsed policy the anchor.

    Detectors of the failures that the catalogue calls a collapse report them; mere symptoms (garbled output, a lost
    reward) are read here, before a detector is certain.
    """

    def __init__(self) -> None:
        causes = (kind for kind in kinds().values() if kind.collapse and not kind.symptom)
        makers = dict.fromkeys(detector_class(kind) for kind in causes)
        self._watch: tuple[Detector, ...] = tuple(make() for make in makers)
        self._common: Mapping[type, Any] = {}
        """Detectors of the run by type, to which one is added when it is loaded."""
        self._garbled = {name: Window(rows=ROWS, steps=ROWS) for name, _ in GARBLED}
        self._ago: dict[str, int] = {}
        self._reading: tuple[dict[str, tuple[str, ...]], frozenset[str]] | None = None
        """Beginning of the newest row, and the names of the detectors that read a metric of it."""
        self._awake_over: list[Detector] | None = None
        """Detectors that may have a finding in the present stretch of rows; None until known."""

    def begin_stretch(self) -> None:
        """Take note that a stretch of rows begins, in which the detectors that rest stay the same."""
        self._awake_over = None

    def rest_over(self, rows: Stretch) -> bool:
        """Return True if no row of a stretch can show a sign of collapse, and none is remembered.

        It is called once the run's detectors have read the rows ahead.
        """
        garbled = any(name in rows.metrics for name, _ in GARBLED)
        return not (self._ago or garbled or self._awake(rows.rows[0]))

    def update(self, step: ClosedStep, *, in_stretch: bool = False) -> None:
        """Read the row ``step`` for signs of collapse that rule out a reset of the reference policy.

        ``in_stretch``: whether the row belongs to the stretch whose beginning was noted.
        """
        if self._ago:
            self._ago = {kind: rows + 1 for kind, rows in self._ago.items() if rows < ROWS}
        awake = self._awake_over if in_stretch else None
        if awake is None:
            awake = self._awake(step)
            self._awake_over = awake if in_stretch else None
        for detector in awake:
            for finding in detector.update(step):
                if finding.severity is not Severity.INFO and finding.kind in collapse_kinds():
                    self._ago[finding.kind] = 0
        numbers = step.numbers
        for name, limit in GARBLED:
            value = numbers.get(name)
            if value is not None:
                self._garbled[name].update(step.step, value)
                level = self._garbled[name].get()
                if level is not None and level > limit:
                    self._ago["garbled output"] = 0

    def _awake(self, step: ClosedStep) -> list[Detector]:
        """Return the detectors that may have a finding at this row."""
        if step.numbers is not step.metrics:
            self._use_common()
            return list(self._watch)
        if self._reading is None or self._reading[0] is not step.beginning:
            self._use_common()
            self._reading = step.beginning, frozenset(detector.name for detector in reading(self._watch, step))
        there = self._reading[1]
        return [
            one for one in self._watch if not (isinstance(one, BaseDetector) and one.rests(reads=one.name in there))
        ]

    def share(self, common: Mapping[type, Any]) -> None:
        """Use the run's own detectors in ``common`` instead of separate ones of their type, also those that are added
        to it before a row that concerns them.
        """
        self._common = common
        self._use_common()

    def _use_common(self) -> None:
        self._watch = tuple(self._common.get(type(detector), detector) for detector in self._watch)

    def why(self, context: RunContext) -> tuple[str, ...]:
        """Return the signs of collapse in the last rows, in words; empty if a reset of the reference would do no harm.

        ``context``: course of the run's main metrics.
        """
        signs = list(self._ago)
        if context.reward.fallen():
            signs.append("reward_drop")
        if context.truncated:
            signs.append("truncated responses")
        return tuple(signs)


# KL to the reference is flat at a high level: the plateau that a reset of the reference is for (ProRL).

FLAT_NOTABLE = 0.3
"""Nats per token below which a flat KL is just small."""
HELD_OUT = 0.05
"""Nats per token below which a flat KL is just small even though held-out scores have stalled; above, the KL term
limits the policy.
"""
TREND_ROWS = 60
PAST_ROWS, PAST_STEPS = 120, 1000
"""Number of past rows, and of past steps, with which KL is compared."""
FLAT_KL = 0.15
"""Relative change over the trend window that counts as flat."""
JUMP = 0.5
"""Relative distance of the last rows from the trend window that makes them a jump, which a robust trend ignores."""
HEAVY_SHARE = 0.5
"""Share of the loss from which the KL term dominates the update."""


class KLPlateau(BaseDetector):
    """Base that detects a flat KL to the reference; :class:`~rlwatch.detectors.trust_region.kl_reference.KLReference`
    adds growth.

    If level and slope are flat: ``kl_saturation``; if held-out scores have stalled as well: ``reset_due``.

    ProRL (arXiv 2505.24864) resets when validation stagnates or degrades under a KL term that has come to dominate.
    Neither is reported in a collapse (see :class:`Vetoes`), nor for some rows after one: a reset then saves nothing and
    makes the bad policy the anchor. While held-out scores still rise, no reset is due.
    """

    reads: ClassVar[tuple[str, ...]] = ("policy/kl_ref", "policy/kl_ref_k3", "policy/kl_ref_k2", "policy/kl_ref_k1")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in reads)
    shares: ClassVar[tuple[str, ...]] = ("_context",)

    def __init__(self) -> None:
        super().__init__()
        self._context = RunContext()
        self._validation = Validation()
        self._vetoes = Vetoes()
        self._restart()

    def share(self, common: Mapping[type, Any]) -> None:
        """Share state with the run's other detectors, whose findings count as signs of collapse.

        ``common``: class of the shared state -> the object that all detectors of the run use.
        """
        super().share(common)
        self._vetoes.share(common)

    def _restart(self) -> None:
        self._now = Window(rows=10, steps=10)
        self._past = Window(rows=PAST_ROWS, steps=PAST_STEPS, least=8)
        self._flat = Hold(forgive=2)
        self._stalled = Hold(forgive=2)

    def notice(self, event: Event) -> None:
        """Start anew after a reset of the reference: KL to the new one begins at zero, and scores need time."""
        if event.kind == "reference_reset":
            self._restart()
            self._validation = Validation()
            self._held = []

    def listen(self, step: ClosedStep) -> None:
        """Read the context, the held-out scores and the signs of collapse from every row."""
        self._context.update(step)
        self._validation.update(step)
        self._vetoes.update(step, in_stretch=self._taken_ahead)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge whether KL to the reference is flat, and whether a collapse rules out a reset of it; return the
        finding, if any.
        """
        kl = abs(finite(step, *self.reads) or 0.0)
        self._now.update(step.step, kl)
        self._past.update(step.step, kl)
        now = self._now.get()
        if now is None:
            return []
        stalls = now >= HELD_OUT and self._validation.stalls()
        change = self._change(now) if stalls or now >= FLAT_NOTABLE else None
        flat = change is not None and abs(change) < FLAT_KL * now
        self._flat.update(step.step, flat and now >= FLAT_NOTABLE)
        self._stalled.update(step.step, flat and stalls)
        if not (self._flat.lasted(10) or self._stalled.lasted(10)) or self._vetoes.why(self._context):
            return []
        if self._stalled.lasted(10):
            return [self._due(step, now, change)]
        return [self._saturated(step, now, change)]

    def _change(self, now: float) -> float | None:
        """Return the change of KL over the trend window, nats; None with too few rows, or if the last ones jumped."""
        rows = self._past
        if len(rows) < 20 or rows.at[-1] - rows.at[0] < 50:
            return None
        at, values = rows.at[-TREND_ROWS::2], rows.values[-TREND_ROWS::2]
        if abs(now - median(values)) > JUMP * now:
            return None
        return theil_sen(at, values) * (at[-1] - at[0])

    def _saturated(self, step: ClosedStep, now: float, change: float | None) -> Finding:
        share, rising = self._share(step, now), self._validation.rises()
        heavy = share is not None and share >= HEAVY_SHARE and not rising
        text = "" if share is None else f"; the KL term is {share:.0%} of the loss"
        due = ", but held-out scores still rise" if rising else ": a reference reset is due"
        return self.finding(
            step,
            "kl_saturation",
            Severity.WARNING if heavy else Severity.INFO,
            f"KL to the reference has been flat at {number(now)} nats/token{text}{due}",
            onset=self._flat.since,
            metric="policy/kl_ref",
            score=now / FLAT_NOTABLE,
            evidence=rounded({"kl": now, "change": change, "loss_share": share}),
        )

    def _due(self, step: ClosedStep, now: float, change: float | None) -> Finding:
        validation, share = self._validation, self._share(step, now)
        best, score = validation.best or 0.0, validation.now or 0.0
        return self.finding(
            step,
            "reset_due",
            Severity.WARNING,
            f"held-out score stands at {number(score)}, {number(best - score)} below its best of step "
            f"{validation.best_step}, and no longer rises, while KL to the reference is flat at {number(now)} "
            "nats/token and nothing collapses: a reference reset is due",
            onset=self._stalled.since,
            metric="policy/kl_ref",
            score=now / HELD_OUT,
            evidence=rounded(
                {"kl": now, "change": change, "loss_share": share, "held_out": score, "held_out_best": best}
            ),
        )

    def _share(self, step: ClosedStep, now: float) -> float | None:
        coefficient, loss = finite(step, "policy/kl_coef"), finite(step, "loss/policy")
        if coefficient is None or loss is None:
            return None
        term = abs(coefficient) * now
        return min(term / (term + abs(loss)), 1.0) if term > 0.0 else 0.0


# The other half: KL that grows without bound.

DRIFT, HEAVY = 0.3, 1.0
"""Nats per token of KL from which a rise is a drift, and from which it may be critical."""
SHARPENS = 1.25
"""Ratio of KL gained to entropy spent up to which a policy only sharpens towards what its reference also prefers; a
policy that learns to deceive its reward moves as far without spending entropy.
"""
UNPAID, UNPAID_FACTOR = 2.0, 1.3
"""KL, nats per token, and growth factor, from which slow growth is reported even if the reward has risen with it."""
FACTOR = 3.0
"""Factor of KL over the run's own earlier level that counts as drift."""
ESTABLISHED = 0.1
"""KL, nats per token, below which the earlier level is just the beginning, from which any growth is a large factor."""
SLOW_ROWS, SLOW_FACTOR = 50, 2.0
"""Rows and factor of the slow test. If batches are small the KL of a row varies over two decades: ten rows cannot
distinguish a factor of three from chance, fifty can detect a factor of two or three.
"""
FAR, LEAST_FIRST = 10.0, 0.02
"""Factor over the run's first rows that is far, and the level in nats per token to which a lower start is raised."""
GROWTH_SURE = 3.0
"""Standard errors, of the logarithm of KL, that growth must exceed."""
NOTHING = 1e-3
"""KL, nats per token, below which it counts as zero, whatever its logarithm does."""
HUGE = 20.0
"""KL, nats per token, that no useful policy has to its reference: so high a mean is a numerical breakdown."""


class KLReference(KLPlateau):
    """Detector of KL to the reference that grows, or stays flat at a high level; it starts anew after a reset.

    KL is compared with its own earlier level. Growth alone is how a policy learns; it is a drift if the run does not
    gain by it. Up to a nat per token in a run whose reward is above its start it is ``info``, and up to two if the
    reward rose as entropy was spent.
    """

    name: ClassVar[str] = "kl_reference"
    follows: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._unscored = False
        """True while :meth:`pass_over` has taken all but the signs of a collapse, as no held-out score is logged."""

    def _restart(self) -> None:
        super()._restart()
        self._entropy = Window(rows=60, steps=10**9)
        self._slow = Window(rows=SLOW_ROWS, steps=2 * SLOW_ROWS, least=20)
        self._with_sign = Window(rows=10, steps=10)
        self._began = Baseline()
        self._risen = Hold(forgive=3)
        self._warned = Hold(forgive=2)
        self._crept = Hold(forgive=2)
        self._confirmed = Hold(forgive=2)

    def listen(self, step: ClosedStep) -> None:
        """Read entropy from every row, in addition to what :class:`KLPlateau` reads."""
        if self._taken_ahead and self._unscored:
            self._context.update(step)
            self._vetoes.update(step, in_stretch=True)
            return
        super().listen(step)
        entropy = finite(step, "policy/entropy")
        if entropy is not None:
            self._entropy.update(step.step, min(abs(entropy), MOST))

    def pass_over(self, rows: Stretch) -> bool:
        """Read KL of all ``rows`` at once if it is, and has long been, too low to matter; otherwise return False.

        :meth:`listen` follows the signs of a collapse row by row.
        """
        past, now = self._past, self._now
        signed = rows.first(*self.reads)
        values = list(map(abs, signed))
        holds = (self._flat, self._stalled, self._warned, self._confirmed, self._crept)
        if len(past) < PAST_ROWS or any(hold.since is not None for hold in holds) or not self._began.done:
            return False
        scored = self._validation.known or _read(rows.rows[0]) is not None
        most = HELD_OUT if scored else DRIFT / 2.0
        if (past.oldest or 0) <= rows.steps[-1] - PAST_STEPS or max(*values, now.most, self._slow.most) >= most:
            return False
        for window in (now, past, self._slow):
            window.extend(rows.steps, values)
        self._with_sign.extend(rows.steps, signed)
        for hold in (*holds, self._risen):
            hold.miss(rows.steps)
        self._vetoes.begin_stretch()
        self._unscored = SCORE not in rows.metrics and not any(name.startswith(SETS) for name in rows.metrics)
        entropies = rows.column("policy/entropy") if self._unscored else []
        if entropies:
            self._entropy.extend(rows.steps, [min(abs(entropy), MOST) for entropy in entropies])
        return True

    def rests_over(self, rows: Stretch) -> bool:
        """Return True if no held-out score is logged, and no sign of a collapse can show in the ``rows``."""
        return self._unscored and self._vetoes.rest_over(rows)

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge whether KL to the reference grows or is flat; return the findings, if any."""
        flat = super().judge(step)
        signed = finite(step, *self.reads) or 0.0
        kl = abs(signed)
        self._with_sign.update(step.step, signed)
        self._slow.update(step.step, kl)
        self._began.update(step.step, kl)
        now = self._now.get()
        if now is None or not self._has_before(self._now):
            return flat
        # The earlier level is expensive, and does not matter while KL is nearly zero.
        matters = now > DRIFT or kl > DRIFT / 2.0 or self._warned.rows or self._confirmed.rows
        before = self._before(self._now) if matters else now
        grown = self._grown(self._now, FACTOR, now, before)
        self._risen.update(step.step, kl > max(1.5 * before, DRIFT / 2.0))
        self._warned.update(step.step, now > DRIFT and (grown or self._far(now)))
        lost = now > DRIFT and now > FACTOR * before and self._context.reward.fallen()
        runaway = now > HEAVY and before > ESTABLISHED and grown and not self._gained
        self._confirmed.update(step.step, lost or runaway or (now > HUGE and not self._gained))
        if self._confirmed.lasted(8, 20) or self._warned.lasted(3):
            return [self._drift(step, now, before), *flat]
        # What has grown is not flat, however straight the line through it.
        return self._creep(step) or flat

    @property
    def _gained(self) -> bool:
        """Return whether the reward has risen while KL grew, and has not fallen again."""
        reward = self._context.reward
        return reward.risen() and not reward.fallen()

    def _far(self, now: float) -> bool:
        """Return whether KL is high and a multiple of how it began, and the reward is not above its start.

        A slow growth moves its own baseline, however far it goes.
        """
        first, reward = self._began.first, self._context.reward
        if first is None or now <= HEAVY or now <= FAR * max(first, LEAST_FIRST):
            return False
        gained = reward.now is None or reward.start is None or reward.now > reward.start + reward.noise
        return not gained

    def _has_before(self, last: Window, rows: int = 5) -> bool:
        """Return whether there are ``rows`` rows before the last ones, within the past window."""
        return len(self._past) - len(last) >= rows

    def _before(self, last: Window) -> float:
        """Return the median KL of the past rows before the rows in ``last``."""
        return median(self._past.values[: -len(last)])

    def _grown(self, last: Window, factor: float, now: float, before: float) -> bool:
        """Return whether the level of ``last`` is a multiple of the earlier one, beyond the noise of single rows."""
        if now <= factor * before:
            return False
        noise = noise_of([math.log(max(kl, NOTHING)) for kl in self._past.values])
        error = MEDIAN_ERROR * noise * math.sqrt(1.0 / len(last) + 1.0 / (len(self._past) - len(last)))
        return math.log(now / max(before, NOTHING)) > GROWTH_SURE * error

    def _creep(self, step: ClosedStep) -> list[Finding]:
        """Return findings of growth that the last rows alone do not show."""
        least = self._slow.least
        if len(self._slow) < least or not self._has_before(self._slow, least):
            return []
        # A low KL matters to no run, so most rows need not compute the reward's noise.
        begins = bool(self._crept.rows) or self._slow.reaches(HEAVY)
        most, factor = (UNPAID, UNPAID_FACTOR) if begins and self._gained else (HEAVY, SLOW_FACTOR)
        if not self._slow.reaches(most) and not self._crept.rows:
            self._crept.update(step.step, condition=False)
            return []
        now, before = self._slow.get() or 0.0, self._before(self._slow)
        self._crept.update(
            step.step, now > most and before > ESTABLISHED and self._grown(self._slow, factor, now, before)
        )
        return [self._drift(step, now, before, slowly=True)] if self._crept.lasted(3) else []

    def _course(self, before: float, now: float) -> str:
        """Return the course of KL in words, with the sign of its estimate: k1 may be negative, only its size counts."""
        if (self._with_sign.get() or 0.0) >= 0.0:
            return f"KL to the reference grew from {number(before)} to {number(now)} nats/token"
        return (
            f"the estimate of KL to the reference is negative, {number(-now)} nats/token; its size was {number(before)}"
        )

    def _severity(self, now: float, before: float, onset: int, *, slowly: bool) -> Severity:
        """Return a remark where the reward is above its start and KL low, or rose as the policy sharpened."""
        if self._confirmed.lasted(8, 20):
            return Severity.CRITICAL
        pays = self._context.reward.pays(onset)
        sharper = now <= UNPAID and pays and now - before <= SHARPENS * self._entropy_spent(onset)
        paid = not slowly and ((now <= HEAVY and self._gained) or sharper)
        return Severity.INFO if paid else Severity.WARNING

    def _entropy_spent(self, onset: int) -> float:
        """Return the entropy lost since the rows before ``onset``, nats per token; 0 where it is unknown."""
        rows = self._entropy
        until = max(bisect_left(rows.at, onset), 1)
        return median(rows.values[:until][-10:]) - median(rows.values[-10:]) if len(rows) >= rows.least else 0.0

    def _drift(self, step: ClosedStep, now: float, before: float, *, slowly: bool = False) -> Finding:
        """Return the finding; ``slowly``: only the slow test shows the growth."""
        since = next((h.since for h in (self._risen, self._warned, self._crept) if h.since is not None), step.step)
        severity = self._severity(now, before, since, slowly=slowly)
        return self.finding(
            step,
            "kl_drift",
            severity,
            f"{self._course(before, now)}{self._context.reward.in_words()}",
            onset=since,
            metric="policy/kl_ref",
            score=now / max(FACTOR * before, DRIFT),
            baseline=before,
            evidence=rounded({"kl": now, "kl_before": before, "reward": self._context.reward.now}),
        )
