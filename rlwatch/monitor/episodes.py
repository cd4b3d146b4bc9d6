"""Lifecycle of findings: turn the findings that hold at every step into changes, each reported once.

A change is: began, worsened, eased, resolved. A detector reports at every step which findings hold. An *episode* (the
time for which a finding holds) begins with the first report and may worsen. It ends when the detector has been silent
for some rows and the metric of the finding is back inside the band it left. Silence alone is not enough: a detector
that compares with a moving baseline falls silent although the metric has not recovered. If the band is unknown, because
the finding held from the first row on, the metric must leave the level it had during the episode. A reward that has
risen above its level before ends an episode, too, even if the metric is still out of its band.

Detectors report a finding for longer than its cause lasts, so a recovery is also detected from the metrics. A critical
episode eases once its metric is half of the way back to its level before, and so is the reward if it fell meanwhile.
The episode ends once both are back inside their bands. A finding without a metric that moved (weights that are NaN)
cannot recover in this way. After a relapse, the waiting times double.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlwatch.detectors.base import rounded
from rlwatch.detectors.context import noise_of
from rlwatch.records import ClosedStep, Finding, Severity, Stage
from rlwatch.stats import Hold, median
from rlwatch.wording import number

QUIET_ROWS = 5
"""Number of rows without a finding that end its episode."""
REMEMBERED_ROWS, BEFORE_ROWS, LEVEL_ROWS = 64, 12, 3
"""Number of rows kept; rows before an onset that give the level and noise before it; rows that give the level now."""
FAR, FAR_SPIKE, FAR_SHARE = 3.0, 6.0, 0.25
"""Smallest distance from the level before that counts as a departure: in units of noise for a level and for a single
row, and as a fraction of the level before.
"""
HALF, NEARLY = 0.5, 0.75
"""Fraction of the departure that must be undone to ease, and to end."""
LEAST_FACTOR = 1.5
"""Factor of the level before within which a positive metric is inside its band, even if it had no noise."""
LONG_ROWS = 10
"""Number of reported rows after which a finding holds on, though unreported, while its metric stays out of its band."""
HELD_ROWS = 12
"""Number of rows of an episode that give the level of its metric during the episode."""
EASE_STEPS, RELAPSE_STEPS, OVER_STEPS = 10, 5, 20
"""Steps (and at least three rows) for which a condition must hold to ease, to worsen again, and to end."""
REWARD = "reward/mean"

Row = tuple[int, Mapping[str, float]]


class Way:
    """Departure of one metric from its level before a finding (detected problem) began, and the fraction of the
    departure that is undone.
    """

    __slots__ = (
        "_bound", "_bound_spike", "_factor", "_farthest", "_last", "_spike", "before", "level", "metric", "undone",
    )  # fmt: skip

    def __init__(self, metric: str, rows: Iterable[Row], onset: int) -> None:
        """Follow ``metric`` from the kept ``rows`` (step and values) before and since the step ``onset``."""
        known = [(step, row[metric]) for step, row in rows if metric in row]
        earlier = [value for step, value in known if step < onset and math.isfinite(value)][-BEFORE_ROWS:]
        self.metric = metric
        self.before = median(earlier) if len(earlier) >= LEVEL_ROWS else None
        """Level before the onset; None if too few earlier rows are kept."""
        self.level: float | None = None
        """Median of the last rows; None while there are too few, or since one was not finite."""
        self.undone: float | None = None
        """Fraction of the departure that is undone, at most 1: by differences or by ratios, whichever is less.

        None if the metric has not departed, or its present level is unknown.
        """
        noise, least = noise_of(earlier), FAR_SHARE * abs(self.before or 0.0)
        self._bound, self._bound_spike = max(FAR * noise, least), max(FAR_SPIKE * noise, least)
        positive = min(earlier, default=0.0) > 0.0
        self._factor = math.log(LEAST_FACTOR)
        if positive:
            self._factor = max(self._factor, FAR * noise_of([math.log(value) for value in earlier]))
        self._last: deque[float] = deque(maxlen=LEVEL_ROWS)
        self._farthest = self._spike = self.before or 0.0
        for step, value in known:
            if step >= onset:
                self.take({metric: value})

    def take(self, row: Mapping[str, float]) -> None:
        """Update the metric's level and departure from the next row (metric -> value); a row without the metric changes
        nothing.
        """
        value, before = row.get(self.metric), self.before
        if value is None:
            return
        self.level = self.undone = None
        if not math.isfinite(value):
            self._last.clear()
            return
        self._last.append(value)
        if before is not None and abs(value - before) > abs(self._spike - before):
            self._spike = value
        if len(self._last) < LEVEL_ROWS:
            return
        self.level = level = sorted(self._last)[LEVEL_ROWS // 2]
        if before is None:
            return
        if abs(level - before) > abs(self._farthest - before):
            self._farthest = level
        self.undone = self._undone(before, level)

    @property
    def farthest(self) -> float | None:
        """Value of the metric farthest from its level before the finding: a median of rows, or else a single value.

        None if the metric has not departed from that level.
        """
        if self.before is None:
            return None
        if abs(self._farthest - self.before) > self._bound:
            return self._farthest
        return self._spike if abs(self._spike - self.before) > self._bound_spike else None

    @property
    def fell(self) -> bool:
        """True if the metric went below its level before the finding began."""
        farthest = self.farthest
        return farthest is not None and self.before is not None and farthest < self.before

    @property
    def inside(self) -> bool:
        """True if the metric has come back to its level before the finding, within noise, or has moved beyond it.

        At least half of the departure must be undone: the noise of a metric may include its farthest value.
        """
        before, level, farthest = self.before, self.level, self.farthest
        if before is None or level is None or farthest is None or (self.undone or 0.0) < HALF:
            return False
        rose = farthest > before
        beyond = level - before if rose else before - level
        if beyond <= self._bound:
            return True
        if min(before, level) <= 0.0:
            return False
        return (_log_ratio(level, before) if rose else _log_ratio(before, level)) <= self._factor

    @property
    def gained(self) -> bool:
        """True if the present level of the metric is above its level before the finding by more than noise."""
        return self.before is not None and self.level is not None and self.level - self.before > self._bound

    def words(self) -> str:
        """Return a description of the metric's recovery, such as ``reward/mean back at 0.71, 0.74 before``."""
        how = "back at" if self.inside else "half of the way back, at"
        return f"{self.metric} {how} {number(self.level)}, {number(self.before)} before"

    def _undone(self, before: float, level: float) -> float | None:
        farthest = self.farthest
        if farthest is None:
            return None
        share = (level - farthest) / (before - farthest)
        if min(before, farthest, level) > 0.0:
            share = min(share, _log_ratio(level, farthest) / _log_ratio(before, farthest))
        return min(share, 1.0)


def _log_ratio(over: float, under: float) -> float:
    """Return the logarithm of the ratio of two positive numbers, which itself may be beyond a float."""
    ratio = over / under
    return math.log(ratio) if 0.0 < ratio < math.inf else math.log(over) - math.log(under)


def _patient() -> Hold:
    return Hold(forgive=1)


@dataclass(slots=True)
class FindingLifecycle:
    """One episode of a finding (detected problem), from its beginning to its end: the last report of its detector, and
    the published severity.

    ``peak``: highest severity so far. ``own``, ``reward``: departures of the finding's metric and of the reward from
    their levels before. ``over``: whether the episode was reported as ended.
    """

    finding: Finding
    severity: Severity
    peak: Severity
    own: Way | None = None
    reward: Way | None = None
    quiet: int = 0
    unread: int = 0
    gone: int | None = None
    over: bool = False
    followed: bool = False
    by_level: bool = False
    patience: int = 1
    lower: Hold = field(default_factory=_patient)
    nearly: Hold = field(default_factory=_patient)
    relapse: Hold = field(default_factory=_patient)
    held: deque[float] = field(default_factory=lambda: deque(maxlen=HELD_ROWS))
    """Values of the metric in the rows in which the finding was reported."""
    reported: int = 0
    """Number of rows in which the finding was reported."""

    def take(self, row: Mapping[str, float]) -> None:
        """Update the departures of the finding's metric and of the reward from the next row (metric -> value)."""
        for way in self.ways:
            way.take(row)

    def hold(self, row: Mapping[str, float]) -> None:
        """Count a row in which the detector reported the finding, and keep the value of the finding's metric in it."""
        self.reported += 1
        value = row.get(self.finding.metric)
        if value is not None and math.isfinite(value):
            self.held.append(value)

    def follow(self, rows: Iterable[Row]) -> None:
        """Begin to follow how far the finding's metric and the reward have departed from their levels before the
        finding.

        ``rows``: kept rows, (step, metric -> value), oldest first.
        """
        onset, metric = self.finding.onset_step, self.finding.metric
        self.own = Way(metric, rows, onset)
        self.reward = self.own if metric == REWARD else Way(REWARD, rows, onset)

    @property
    def ways(self) -> tuple[Way, ...]:
        """Departures of the finding's metric and of the reward, without repeats; empty if they are not followed."""
        if self.own is None or self.reward is None:
            return ()
        return (self.own,) if self.own is self.reward else (self.own, self.reward)

    def worsens(self, finding: Finding) -> bool:
        """Take a new report of the finding; return True if it is more severe than all earlier reports of the
        episode.
        """
        self.finding, self.quiet, self.unread, self.gone = finding, 0, 0, None
        if self.over or finding.severity.rank <= self.peak.rank:
            return False
        self.severity = self.peak = finding.severity
        self.by_level = False
        self.lower.clear()
        return True

    def at_most(self, finding: Finding) -> Finding:
        """Return a report of the finding with its severity, or with that of the episode if this is lower."""
        severity = self.severity
        return replace(finding, severity=severity) if finding.severity.rank > severity.rank else finding

    def undone(self, share: float) -> bool:
        """Return whether the finding's metric has undone the fraction ``share`` of its departure.

        If the reward fell, it must have undone that fraction, too.
        """
        if self.own is None or self.own.undone is None or self.own.undone < share:
            return False
        return all(way.undone is not None and way.undone >= share for way in self.ways if way.fell)

    @property
    def inside(self) -> bool:
        """True if the finding's metric, and the reward if it fell, are back at their levels before the finding, within
        noise.
        """
        return self.own is not None and self.own.inside and all(way.inside for way in self.ways if way.fell)

    @property
    def stays(self) -> bool:
        """True if the metric has not recovered although the detector no longer reports the finding, so that the episode
        continues.
        """
        own, reward = self.own, self.reward
        if own is None or own.level is None or self.finding.severity is Severity.INFO:
            return False
        if reward is not None and reward is not own and reward.gained:
            return False
        if own.before is not None:
            return own.farthest is not None and not own.inside
        if own is reward or len(self.held) < LEVEL_ROWS:
            # A reward that never moved is reported for not moving, so its level is no evidence.
            return False
        held = list(self.held)
        left = abs(own.level - median(held)) > max(FAR * noise_of(held), FAR_SHARE * abs(median(held)))
        return not left

    @property
    def _paid_back(self) -> bool:
        """True if the reward fell during the episode and at least half of the fall is undone."""
        reward = self.reward
        return reward is not None and reward is not self.own and reward.fell and (reward.undone or 0.0) >= HALF

    def look(self, step: ClosedStep, reported: Severity) -> Finding | None:
        """Update the episode with the severity ``reported`` at a closed step; return the change to publish, or None."""
        if not self.followed:
            return self._eased(step, reported, half=False) or self._worse_again(step, reported)
        half = self.undone(HALF)
        self.relapse.update(step.step, not half)
        if self.over:
            return None
        change = self._eased(step, reported, half=half) or self._worse_again(step, reported)
        nearly = self.severity is not Severity.CRITICAL and self.undone(NEARLY) and self.inside
        self.nearly.update(step.step, nearly)
        if change is None and self.nearly.lasted(3, OVER_STEPS * self.patience):
            self.over, self.gone = True, self.nearly.since
            return self.ended(step, self.reason())
        return change

    def _eased(self, step: ClosedStep, reported: Severity, *, half: bool) -> Finding | None:
        milder = reported.rank < self.severity.rank and (not self.stays or not self.followed or self._paid_back)
        self.lower.update(step.step, milder or (half and self.severity is Severity.CRITICAL))
        if not self.lower.lasted(3, EASE_STEPS * self.patience):
            return None
        was, self.severity = self.severity, reported if milder else Severity.WARNING
        self.by_level = not milder
        self.lower.clear()
        self.relapse.clear()
        how = self.reason() or self.finding.message
        return self._change(step, Stage.EASED, self.severity, f"no longer {was.value} at step {step.step}: {how}")

    def _worse_again(self, step: ClosedStep, reported: Severity) -> Finding | None:
        if reported.rank <= self.severity.rank or (self.by_level and not self.relapse.lasted(3, RELAPSE_STEPS)):
            return None
        self.severity, self.by_level = reported, False
        self.patience *= 2
        self.lower.clear()
        return self._change(step, Stage.WORSENED, reported, self.finding.message)

    @property
    def relapsed(self) -> bool:
        """True if the episode had ended and its condition holds again."""
        return self.over and self.relapse.lasted(3, RELAPSE_STEPS)

    def ended(self, step: ClosedStep, how: str) -> Finding:
        """Return the finding that reports the end of the episode at ``step``.

        ``how``: text with the values that show the recovery; empty if none do.
        """
        onset = self.finding.onset_step
        gone = step.step if self.gone is None else self.gone
        message = f"recovered at step {gone} after {gone - onset} steps: {how}" if how else f"gone since step {gone}"
        return self._change(step, Stage.RESOLVED, Severity.INFO, message)

    def reason(self) -> str:
        """Return a text with the values that show the recovery; empty if none do."""
        back = [way for way in self.ways if (way.undone or 0.0) >= HALF]
        if any(way.fell and way not in back for way in self.ways if way.metric == REWARD):
            return ""
        return "; ".join(dict.fromkeys(way.words() for way in back if way is self.own or way.fell))

    def _change(self, step: ClosedStep, stage: Stage, severity: Severity, message: str) -> Finding:
        own = self.own
        numbers = {} if own is None else {"level": own.level, "before": own.before, "farthest": own.farthest}
        return replace(
            self.finding,
            step=step.step,
            severity=severity,
            message=message,
            evidence=rounded(numbers) if stage.better else self.finding.evidence,
            stage=stage,
        )


class Episodes:
    """Turns findings that hold step after step into changes: began, worsened, eased, ended.

    An episode (the time for which a finding holds) ends after its condition was absent for :data:`QUIET_ROWS` closed
    steps in a row, so a condition that flickers is one episode.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], FindingLifecycle] = {}
        self._rows: deque[Row] = deque(maxlen=REMEMBERED_ROWS)
        self._reasons: dict[str, str] = {}

    def forget_after(self, step: int) -> None:
        """Drop the kept rows after ``step``, which a rollback undid, so that they do not count as a metric's level
        before a finding.
        """
        self._rows = deque((row for row in self._rows if row[0] <= step), maxlen=REMEMBERED_ROWS)

    def arrival(self, holding: Sequence[Finding]) -> list[Finding]:
        """Return the changes of findings after a single row; it may begin or worsen episodes, but ends none.

        ``holding``: findings that detectors report for the row.
        """
        return [change for finding in holding if (change := self._raised(finding)) is not None]

    def closed(self, step: ClosedStep, holding: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Take a closed step; return the changes of findings that it makes, and the findings that hold, with their
        present severity.

        ``holding``: findings that detectors report at the step.
        """
        self._rows.append((step.step, step.metrics))
        if not holding and not self._open:
            return [], []
        for episode in self._open.values():
            episode.take(step.metrics)
        changes = self.arrival(holding)
        reported: dict[tuple[str, str], Severity] = {}
        for finding in holding:
            key = _key(finding)
            known = reported.get(key)
            if known is None or finding.severity.rank > known.rank:
                reported[key] = finding.severity
        for key, severity in reported.items():
            self._open[key].hold(step.metrics)
            change = self._looked(step, key, severity)
            changes += [] if change is None else [change]
        if len(self._open) > len(reported):
            changes += self._ended(step, [key for key in self._open if key not in reported])
        holds: list[Finding] = []
        for finding in holding:
            episode = self._open[_key(finding)]
            if not episode.over:
                holds.append(episode.at_most(finding))
        return changes, [*holds, *self._staying(step)]

    def _staying(self, step: ClosedStep) -> Iterator[Finding]:
        """Yield the findings that their detectors no longer report, but whose metrics have not recovered."""
        for episode in self._open.values():
            if episode.quiet and not episode.over and episode.reported >= LONG_ROWS and episode.stays:
                finding = replace(episode.finding, step=step.step, attempt=step.attempt, seq=step.seq)
                yield replace(finding, severity=episode.severity)

    def standing(self, holding: Sequence[Finding]) -> list[Finding]:
        """Return the findings that hold now, with their present severity.

        These are the findings in ``holding``, and those of open episodes that detectors do not report at the moment.
        """
        reports = {_key(finding): finding for finding in holding}
        going = ((key, episode) for key, episode in self._open.items() if not episode.over)
        known = [episode.at_most(reports.get(key, episode.finding)) for key, episode in going]
        return known + [finding for key, finding in reports.items() if key not in self._open]

    def reason(self, kind: str) -> str:
        """Return a text with the values that show that the newest episode of ``kind`` eased or recovered; empty if
        none do.
        """
        now = (self._reason(episode) for (_, of), episode in self._open.items() if of == kind)
        return next(filter(None, now), "") or self._reasons.get(kind, "")

    def _raised(self, finding: Finding) -> Finding | None:
        """Take a report of a finding; return the change that it is, if any."""
        episode = self._open.get(_key(finding))
        if episode is None:
            self._begin(finding)
            return finding
        if not episode.worsens(finding):
            return None
        self._follow(episode)
        return replace(finding, stage=Stage.WORSENED)

    def _begin(self, finding: Finding) -> None:
        self._reasons.pop(finding.kind, None)
        self._open[_key(finding)] = episode = FindingLifecycle(finding, finding.severity, finding.severity)
        self._follow(episode)

    def _follow(self, episode: FindingLifecycle) -> None:
        episode.follow(self._rows)
        episode.followed = episode.severity is Severity.CRITICAL

    def _looked(self, step: ClosedStep, key: tuple[str, str], severity: Severity) -> Finding | None:
        """Return the change of an episode at a step at which its finding was reported, if any."""
        episode = self._open[key]
        change = episode.look(step, severity)
        if change is not None or not episode.relapsed:
            return change
        since = episode.relapse.since
        again = replace(episode.finding, onset_step=max(episode.finding.onset_step, since or 0))
        self._begin(again)
        return again

    def _ended(self, step: ClosedStep, absent: Sequence[tuple[str, str]]) -> Iterator[Finding]:
        for key in absent:
            episode = self._open[key]
            episode.quiet += 1
            episode.unread += episode.finding.metric not in step.metrics
            episode.gone = step.step if episode.gone is None else episode.gone
            silent = bool(episode.finding.metric) and episode.unread >= QUIET_ROWS
            if episode.quiet < QUIET_ROWS or (episode.stays and not (episode.over or silent)):
                continue
            del self._open[key]
            self._reasons[key[1]] = self._reason(episode)
            matters = (
                episode.severity is not Severity.INFO or episode.finding.metric == REWARD
            )  # the headline uses these
            if not episode.over and matters and not silent:
                yield episode.ended(step, self._reasons[key[1]])  # a metric that is no longer logged has not recovered

    def _reason(self, episode: FindingLifecycle) -> str:
        """Return the values that show its recovery."""
        return episode.reason()


def _key(finding: Finding) -> tuple[str, str]:
    return (finding.detector, finding.kind)
