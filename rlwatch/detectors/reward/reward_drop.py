"""Detect that the reward falls from its best level and stays low, whatever the cause."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, members, rounded
from rlwatch.detectors.context import LIKELY, RewardWatch
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

PREFIX = "reward/by_task/"
TASKS = 16
"""Most tasks that are followed; with more, the rewards of tasks are not used."""
WORSE = 0.15
"""Share of its best level by which a task's own reward has fallen: less than for the mean."""


class TaskRewards:
    """Level of the reward of each task that is logged separately (a :class:`RewardWatch` each)."""

    def __init__(self) -> None:
        self._tasks: dict[str, RewardWatch] = {}
        self._many = False

    def update(self, step: ClosedStep) -> None:
        """Read the mean reward of each task, ``reward/by_task/*``, from the row ``step``."""
        for name in members(step, PREFIX):
            value = finite(step, name)
            if value is None:
                continue
            if name not in self._tasks:
                self._many = self._many or len(self._tasks) >= TASKS
                if not self._many:
                    self._tasks[name] = RewardWatch()
            if not self._many:
                self._tasks[name].take(step.step, value)

    @property
    def mix(self) -> bool:
        """True if there are several tasks and none has fallen, so that only their shares of the batch changed.

        The fall of a noisy task cannot be established, so at least half of them must also be near their best.
        """
        known = [watch for watch in self._tasks.values() if watch.best is not None]
        if self._many or len(known) < 2 or any(watch.fallen(WORSE) for watch in known):
            return False
        return 2 * sum(map(_near_best, known)) >= len(known)


def _near_best(watch: RewardWatch) -> bool:
    return watch.now is not None and watch.best is not None and watch.best - watch.now <= WORSE * abs(watch.best)


WARN, LINGERING, CRITICAL = 0.25, 1 / 3, 0.5
"""Share of the best level lost: for a warning, for critical if it lasts, for critical soon."""
NEWEST, HALF = 2, 0.5
"""Number of newest rows that are enough for ``info``, and the share of the best level that they must have lost."""
CERTAIN = 6.0
"""Standard errors for critical: the reward of small batches of hard and easy prompts varies."""
LONG = 12
"""Steps after which a fall is neither a hard batch nor a short outage of the verifier."""
FEW_ANSWERS = 2
"""Factor on ``LONG`` if a row has few answers: data that stay hard for long look the same."""
VERY_LONG = 60
"""Number of steps after which a loss of ``LINGERING`` is critical, as it does not recover by itself any more."""


class RewardDrop(BaseDetector):
    """Detector of a fallen reward: its median compared with the best level so far, beyond what its own noise explains.

    The last resort: it detects crashes that no other metric explains (off-policy updates without clipping, a reward
    function that changed its sign), and names no cause. If rewards are logged by task and no task has become worse, the
    mix of data has changed: that is ``info``.
    """

    name: ClassVar[str] = "reward_drop"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("reward/mean",),)
    reads: ClassVar[tuple[str, ...]] = ("reward/mean",)
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._tasks = TaskRewards()
        self._below = Hold(forgive=2)
        self._warned = Hold(forgive=1)
        self._newest: deque[float] = deque(maxlen=NEWEST)
        self._confirmed = Hold(forgive=1)
        self._lingering = Hold(forgive=1)

    def listen(self, step: ClosedStep) -> None:
        """Read the mean reward of each task from the row ``step``."""
        self._tasks.update(step)

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if their reward is near its best, so that no fall can begin."""
        holds, course = (self._below, self._warned, self._confirmed, self._lingering), self._reward.ahead(rows)
        tasks = any(name.startswith(PREFIX) for name in rows.metrics)
        if course is None or tasks or any(hold.since is not None for hold in holds):
            return False
        if not (course.cannot_fall(WARN) and course.cannot_be_low(WARN)):
            return False
        for hold in holds:
            hold.miss(rows.steps)
        self._newest.extend(rows.column("reward/mean"))
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge the mean reward over the last rows; return its fall as a finding, if there is one."""
        self._reward.update(step)
        now, best = self._reward.now, self._reward.best
        value = finite(step, *self.reads)
        if now is None or best is None or value is None:
            return []
        self._below.update(step.step, self._reward.low(value, WARN))
        self._warned.update(step.step, self._reward.fallen(WARN))
        self._newest.append(value)
        self._confirmed.update(step.step, self._reward.fallen(CRITICAL, CERTAIN))
        self._lingering.update(step.step, self._reward.fallen(LINGERING, LIKELY))
        long = FEW_ANSWERS * LONG if self._reward.error > 0.0 else LONG
        confirmed = self._confirmed.lasted(4, long) or self._lingering.lasted(8, VERY_LONG)
        if not (now < best and (confirmed or self._warned.lasted(3, 8))):
            return self._remark(step, best)
        return [self._finding(step, now, best, Severity.CRITICAL if confirmed else Severity.WARNING)]

    def _remark(self, step: ClosedStep, best: float) -> list[Finding]:
        """Report that the newest rows earned at most half of the best level, before there are enough rows to judge."""
        if len(self._newest) < NEWEST or self._tasks.mix or not self._reward.plunged(list(self._newest), HALF):
            return []
        newest = sum(self._newest) / NEWEST
        return [
            self.finding(
                step,
                "reward_drop",
                Severity.INFO,
                f"the last {NEWEST} rows earned {number(newest)}, {number(best)} at best: too few to call it a fall",
                onset=self._below.since,
                metric="reward/mean",
                baseline=best,
                evidence=rounded({"reward": newest, "best": best, "noise": self._reward.noise}),
            )
        ]

    def _finding(self, step: ClosedStep, now: float, best: float, severity: Severity) -> Finding:
        mix = self._tasks.mix
        onset = self._below.since if self._below.since is not None else self._warned.since
        span = step.step - (step.step if onset is None else onset)
        return self.finding(
            step,
            "reward_drop",
            Severity.INFO if mix else severity,
            f"reward fell from its best level {number(best)} to {number(now)} over {span} steps"
            + ("; no task became worse, their shares of the batch changed" if mix else ""),
            onset=onset,
            metric="reward/mean",
            score=(best - now) / max(WARN * abs(best), 1e-12),
            baseline=best,
            evidence=rounded({"reward": now, "best": best, "noise": self._reward.noise})
            | ({"mix": True} if mix else {}),
        )
