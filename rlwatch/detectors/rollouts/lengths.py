"""Detect abnormal response lengths: a surge without gain, responses at the limit, and collapse."""

from __future__ import annotations

from operator import truediv
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import FULL, RewardWatch
from rlwatch.detectors.rise import Rise, RiseDetector, RiseLimit, inverse, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Baseline, Hold, Window
from rlwatch.wording import number

ROWS, STEPS = 5, 15
"""Rows and steps for which the medians must stay beyond their limits."""
FACTOR = 9.0
"""Factor on the odds of being cut: from 10 % to half, from half to nine tenths."""


class LengthSurge(RiseDetector):
    """Detector of a surge of length: mean length doubled, or half of the responses cut, without a rise of the reward.

    On Qwen3-4B a surge of length preceded the collapse (arXiv 2602.01826); in healthy runs lengths grow too, with the
    reward. ``length_explosion`` detects responses at the limit.
    """

    name: ClassVar[str] = "length_surge"
    follows_reward: ClassVar[bool] = True
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("len/mean", 32.0, 2.0),
        RiseLimit("len/clipped", 0.5, FACTOR, odds),
        RiseLimit("text/eos_missing", 0.5, FACTOR, odds),
    )

    def __init__(self) -> None:
        super().__init__()
        self._long = Hold(forgive=1)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if the metrics of length are below their limits; otherwise return False."""
        if not self.buffered(rows.steps, [rows.column(limit.metric) for limit in self.limits]):
            return False
        self._long.miss(rows.steps)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the lengths of the row ``step``; return a surge as a finding, if there is one.

        A surge is ignored if the reward rose with it, or if it lies within a few small batches.
        """
        found = super().judge(step)
        self._long.update(step.step, bool(found) and not self._reward.risen())
        return found if self._long.lasted(ROWS, STEPS) and found else []

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the length, or the share of responses that do not end, now and at the
        start.

        ``rise``: the course of that metric.
        """
        level, began = rise.level or 0.0, rise.began or 0.0
        if rise.limit.metric == "len/mean":
            what = f"mean response length is {number(level)} tokens, {number(began)} at the start"
        else:
            share = began / (1.0 + began)
            what = f"{level:.0%} of the responses do not end by themselves, {share:.0%} at the start"
        return self.finding(
            step,
            "length_surge",
            Severity.WARNING,
            what + self._reward.in_words(),
            onset=rise.since,
            metric=rise.limit.metric,
            score=rise.score,
            evidence=rounded(rise.evidence() | {"reward": self._reward.now, "reward_start": self._reward.start}),
        )


# Responses run into the length limit: the policy no longer ends its answers.

NEARLY_ALL = 0.95
"""Share of responses cut at the length limit from which hardly any answer is complete."""
RISE = 0.1
"""Rise above the run's beginning below which the share of cut responses is normal for the run."""
MANY = 0.25
"""Share cut at the limit, from few at the start, that is a warning although the reward is above its start: cut answers
are seldom right. They are if the reward rises with the share.
"""
CUT_LONG = 30
"""Steps from which it is critical, unless the reward has risen with it."""


class LengthExplosion(BaseDetector):
    """Detector of responses cut at the length limit, compared with how the run began.

    Many is a warning, nearly all may be critical. Long answers may be better answers; answers that are cut off are not,
    and once no sample in a group ends, length cannot be unlearned.
    """

    name: ClassVar[str] = "length_explosion"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("len/clipped",),)
    reads: ClassVar[tuple[str, ...]] = ("len/clipped",)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._base = Baseline(floor=0.02)
        self._now = Window(rows=10, steps=15)
        self._rise = Hold(forgive=2)
        self._more, self._many = Hold(forgive=2), Hold(forgive=2)
        self._full = Hold(forgive=2)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if few responses are cut at the limit in each; otherwise return False."""
        shares, now = rows.column("len/clipped"), self._now
        holds = (self._rise, self._more, self._many, self._full)
        level, first = self._base.get(), self._base.first
        if not self._base.done or level is None or first is None or any(hold.since is not None for hold in holds):
            return False
        if now.get() is None or max(*shares, now.most) >= min(MANY, (min(level, first) + NEARLY_ALL) / 2.0):
            return False
        now.extend(rows.steps, shares)
        for hold in holds:
            hold.miss(rows.steps)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the share of cut responses over the last rows; return the explosion, if there is one."""
        share = finite(step, *self.reads)
        if share is None:
            return []
        self._base.update(step.step, share)
        self._now.update(step.step, share)
        now, level, first = self._now.get(), self._base.get(), self._base.first
        if now is None or level is None or first is None:
            return []
        start = min(level, first)
        self._rise.update(step.step, share > (start + NEARLY_ALL) / 2.0)
        self._more.update(step.step, share >= MANY and odds(share) > FACTOR * odds(start))
        self._many.update(step.step, now >= max(MANY, start + RISE) and odds(now) > FACTOR * odds(start))
        self._full.update(step.step, now >= NEARLY_ALL and now - start >= RISE)
        full = self._full.lasted(3, 8)
        if not full and not self._many.lasted(ROWS, STEPS):
            return []
        since = [hold.since for hold in ((self._rise, self._full) if full else (self._more, self._many))]
        onset = next((step for step in since if step is not None), step.step)
        return [self._finding(step, now, start, self._severity(onset), onset)]

    def _severity(self, onset: int) -> Severity:
        """Critical where nearly all have long been cut; a remark where the reward rose with it or to full."""
        reward = self._reward
        if not reward.risen():
            return Severity.CRITICAL if self._full.lasted(5, CUT_LONG) else Severity.WARNING
        return Severity.INFO if reward.pays(onset) or reward.holds(FULL) else Severity.WARNING

    def _finding(self, step: ClosedStep, now: float, start: float, severity: Severity, onset: int) -> Finding:
        length = finite(step, "len/mean")
        mean = "" if length is None else f" (mean length {number(length)} tokens)"
        return self.finding(
            step,
            "length_explosion",
            severity,
            f"{now:.0%} of responses are cut at the length limit{mean}, {start:.0%} at the start"
            f"{self._reward.in_words()}",
            onset=onset,
            metric="len/clipped",
            score=now / (NEARLY_ALL if now >= NEARLY_ALL else MANY),
            baseline=start,
            evidence=rounded({"clipped": now, "clipped_start": start, "length": length, "reward": self._reward.now}),
        )


# Responses shrink to nothing.

PERHAPS = 2.0
"""Standard errors from which a rise of the reward is possible, for a finding that requires that there is none."""
SHORT = 0.3
"""Ratio of length to its start; a smaller change is normal (learning a format halves lengths in healthy runs)."""
NOTHING = 0.1
"""Ratio of length to its start below which a response is hardly an answer."""
EMPTY = 0.5
"""Share of responses without a token that counts as most."""
SOON, LONG = 8, 20
"""Steps for which a warning, and a critical finding, must last."""


class LengthCollapse(BaseDetector):
    """Detector of responses that shrink to nothing: mean length, or the share of empty ones, compared with the start.

    Short answers may be good answers: with a reward above its start, short ones are not reported, and tiny ones are a
    warning. Critical only if answers are nearly empty and the reward has not risen by it. A reward that once rose
    counts as risen until it falls: few noisy rows, far apart, do not show it each time.
    """

    name: ClassVar[str] = "length_collapse"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("len/mean",), ("len/p50",), ("len/empty",))
    reads: ClassVar[tuple[str, ...]] = ("len/mean", "len/p50", "len/empty")
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._base = Baseline()
        self._now, self._empty = (Window(rows=10, steps=15) for _ in range(2))
        self._empty_base = Baseline(floor=0.02)
        self._row, self._short, self._gone = (Hold(forgive=2) for _ in range(3))
        self._rose = False

    def pass_over(self, rows: Stretch) -> bool:
        """Read the lengths of all ``rows`` at once if none is close to short.

        Where it is not known in advance whether the reward rises, :meth:`judge` checks it row by row.
        """
        lengths, began = list(map(abs, rows.first("len/mean", "len/p50"))), self._base.get()
        holds = (self._row, self._short, self._gone)
        if not lengths or began is None or not self._base.done or any(hold.since is not None for hold in holds):
            return False
        empty = "len/empty" in rows.metrics or self._empty.get() is not None
        if empty or min(*lengths, self._now.lowest) < (1.0 + SHORT) / 2.0 * max(began, 0.0):
            return False
        self._now.extend(rows.steps, lengths)
        for hold in holds:
            hold.miss(rows.steps)
        course = self._reward.ahead(rows)
        stays = course is not None and (
            (course.stays_above and course.cannot_fall()) if self._rose else course.cannot_rise()
        )
        self._rows_left = 0 if stays else len(rows.steps)
        return stays

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the mean length of responses over the last rows; return its collapse as a finding, if there is one."""
        self._rose = self._reward.risen(PERHAPS) or (self._rose and self._reward.above and not self._reward.fallen())
        if self._rows_left:
            self._rows_left -= 1
            return []
        length, empty = finite(step, "len/mean", "len/p50"), finite(step, "len/empty")
        if length is not None:
            self._base.update(step.step, abs(length))
            self._now.update(step.step, abs(length))
        if empty is not None:
            self._empty_base.update(step.step, empty)
            self._empty.update(step.step, empty)
        began = self._base.get()
        low = length is not None and began is not None and abs(length) < (1.0 + SHORT) / 2.0 * began
        self._row.update(step.step, low or (empty is not None and empty >= EMPTY / 2.0))
        gone = self._emptied or (self._share is not None and self._share < NOTHING)
        self._gone.update(step.step, gone)
        self._short.update(step.step, gone or self._shrunk)
        if not self._short.lasted(3, SOON):
            return []
        severe = self._gone.lasted(5, LONG) and not self._rose
        return [self._finding(step, Severity.CRITICAL if severe else Severity.WARNING)]

    @property
    def _share(self) -> float | None:
        """Return the length now over the length at the start."""
        now, began = self._now.get(), self._base.get()
        return None if now is None or not began else now / began

    @property
    def _shrunk(self) -> bool:
        return self._share is not None and self._share < SHORT and not self._rose

    @property
    def _emptied(self) -> bool:
        now, began = self._empty.get(), self._empty_base.get()
        return now is not None and began is not None and now >= max(EMPTY, 2.0 * began)

    def _finding(self, step: ClosedStep, severity: Severity) -> Finding:
        now, began, empty = self._now.get(), self._base.get(), self._empty.get()
        if self._emptied or now is None or began is None:
            what, metric = f"{empty or 0.0:.0%} of the responses are empty", "len/empty"
        else:
            what, metric = f"responses have shrunk to {number(now)} tokens, {number(began)} at the start", "len/mean"
        share = self._share
        return self.finding(
            step,
            "length_collapse",
            severity,
            what + self._reward.in_words(),
            onset=self._row.since if self._row.since is not None else self._short.since,
            metric=metric,
            score=min(SHORT / share, 1e6) if share else None,
            baseline=began,
            evidence=rounded(
                {"length": now, "start": began, "share": share, "empty": empty, "reward": self._reward.now}
            ),
        )


# Detect a long tail of response lengths: the whole batch waits for a few responses.


class LongTail(RiseDetector):
    """Detector of a long tail of lengths, idle generation slots, and responses carried over to the next iteration
    (C3PO++).

    arXiv 2510.18855 publishes no limits; these are far from what even lengths give, and the run's own beginning counts
    first. ``1 - mean / max`` of a batch is the least share of a synchronous engine's slots that idle. It costs time,
    not quality: ``info`` if only lengths show it, a warning if work is carried over or wasted.
    """

    name: ClassVar[str] = "long_tail"
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("len/tail_ratio", 4.0, 2.0),
        RiseLimit("len/max_over_mean", 5.0, 2.0),
        RiseLimit("len/bubble", 0.8, 2.0, odds),
        RiseLimit("len/gini", 0.6, 2.0, odds),
        RiseLimit("partial/frac", 0.4, 2.0, odds),
        RiseLimit("partial/retention_mean", 2.0, 2.0),
        RiseLimit("partial/retention_max", 6.0, 2.0),
        RiseLimit("len/budget_used", 0.6, 1.5, inverse),
        RiseLimit("time/rollout_idle", 0.5, 2.0, odds),
    )
    reads: ClassVar[tuple[str, ...]] = (*(limit.metric for limit in limits), "len/max")
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (
        *((limit.metric,) for limit in limits),
        ("len/max", "len/mean"),
    )

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if all metrics are below their limits; otherwise return False."""
        columns = {limit.metric: rows.column(limit.metric) for limit in self.limits}
        longest, mean = rows.column("len/max"), rows.column("len/mean")
        if longest and mean and not columns["len/max_over_mean"]:
            if min(mean) < 1.0:
                return False
            columns["len/max_over_mean"] = list(map(truediv, longest, mean))
        return self.buffered(rows.steps, list(columns.values()))

    def read(self, step: ClosedStep, limit: RiseLimit) -> float | None:
        """Return the value in the row ``step`` of the metric that ``limit`` is for; None if it was not measured.

        Maximum over mean of the lengths is computed from the two if it was not logged.
        """
        get = step.numbers.get
        value = get(limit.metric)
        if value is not None or limit.metric != "len/max_over_mean":
            return value
        longest, mean = get("len/max"), get("len/mean")
        return None if longest is None or mean is None or mean < 1.0 else longest / mean

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step`` for the metric that is beyond its limit; ``rise``: its course so
        far.
        """
        metric, level = rise.limit.metric, rise.level or 0.0
        costs = metric.startswith(("partial/", "time/")) or metric == "len/budget_used"
        return self.finding(
            step,
            "long_tail",
            Severity.WARNING if costs else Severity.INFO,
            f"{DESCRIPTIONS[metric]}: {metric} is {number(level)}, its limit here {number(_raw(rise))}",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence()),
        )


def _raw(rise: Rise) -> float:
    """Return the threshold in the metric's own unit."""
    if rise.limit.scale is odds:
        return rise.threshold / (1.0 + rise.threshold)
    return 1.0 / rise.threshold if rise.limit.scale is inverse else rise.threshold


DESCRIPTIONS = {
    "len/tail_ratio": "the longest 1 % of the responses are far longer than the usual one",
    "len/max_over_mean": "the batch waits for a response far longer than the mean",
    "len/bubble": "most generation slots idle while the longest response is finished",
    "len/gini": "a few responses hold most of the tokens",
    "partial/frac": "many responses are carried over from earlier iterations",
    "partial/retention_mean": "responses are carried over repeatedly",
    "partial/retention_max": "one response is carried over repeatedly",
    "len/budget_used": "much of the iteration's token budget is not used",
    "time/rollout_idle": "the rollout engines wait",
}
