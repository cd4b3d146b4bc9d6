"""Life of findings: from "this holds at every step" to began, worsened, eased, resolved, each told once.

A detector says at every step what holds. An episode of it begins, may become worse, and is over when the detector is
silent for some rows and the metric that it names is back inside the band it left: a detector that compares with a past
that moves along falls silent though nothing has come back. Where nobody knows that band, as it was so from the first
row, the metric must have left the level it had meanwhile. A reward that rose above where it was pays for what stays.

Detectors remember what they saw longer than it lasts, so that a recovery is looked for besides: a critical episode
eases once the metric that it names is half of the way back to the level it had before, and the reward, if it fell
meanwhile, too; it is over once both are back inside. What names no metric that moved (weights that are NaN) does not
recover by this. What eases and worsens again has to wait twice as long the next time.
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
"""Rows without a finding that end its episode."""
REMEMBERED_ROWS, BEFORE_ROWS, LEVEL_ROWS = 64, 12, 3
"""Rows that are remembered; rows before an onset that tell the level before it, and its noise; rows of a level now."""
FAR, FAR_SPIKE, FAR_SHARE = 3.0, 6.0, 0.25
"""Noise of a row by which a level, and a single row, must have gone from the level before, and the share of that level:
less is no way to come back."""
HALF, NEARLY = 0.5, 0.75
"""Share of the way that must be undone to ease, and to be over."""
LEAST_FACTOR = 1.5
"""Factor of a positive metric's level before that is inside its band, however calm it was."""
LONG_ROWS = 10
"""Rows in which it was reported from which a finding goes on holding while its metric stays away."""
HELD_ROWS = 12
"""Rows of an episode that tell the level of its metric meanwhile."""
EASE_STEPS, RELAPSE_STEPS, OVER_STEPS = 10, 5, 20
"""Steps, three rows at least, for which it must be so to ease, to be worse again, and to be over."""
REWARD = "reward/mean"

Row = tuple[int, Mapping[str, float]]


class Way:
    """The way of one metric since an onset: away from the level it had before, and how much of that is undone."""

    __slots__ = (
        "_bound", "_bound_spike", "_factor", "_farthest", "_last", "_spike", "before", "level", "metric", "undone",
    )  # fmt: skip

    def __init__(self, metric: str, rows: Iterable[Row], onset: int) -> None:
        """``rows``: those that are remembered, before and since ``onset``."""
        known = [(step, row[metric]) for step, row in rows if metric in row]
        earlier = [value for step, value in known if step < onset and math.isfinite(value)][-BEFORE_ROWS:]
        self.metric = metric
        self.before = median(earlier) if len(earlier) >= LEVEL_ROWS else None
        """Level before the onset; None where too few rows of it are remembered."""
        self.level: float | None = None
        """Median of the last rows; None while there are too few, or since one was not finite."""
        self.undone: float | None = None
        """Share of the way that is undone, at most 1, counted by differences or by factors, whichever is less.

        None where it has gone nowhere, and where nobody knows where it stands.
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
        """Take the next row, which may be without it."""
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
        """Level, or else single row, farthest from the level before; None where it has gone nowhere."""
        if self.before is None:
            return None
        if abs(self._farthest - self.before) > self._bound:
            return self._farthest
        return self._spike if abs(self._spike - self.before) > self._bound_spike else None

    @property
    def fell(self) -> bool:
        """True if it went below the level it had."""
        farthest = self.farthest
        return farthest is not None and self.before is not None and farthest < self.before

    @property
    def inside(self) -> bool:
        """True if its level is back inside the band it left, on the side to which it left or beyond the level before.

        Half of the way at least must be undone: a noisy metric's band may hold where it went.
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
        return (math.log(level / before) if rose else math.log(before / level)) <= self._factor

    @property
    def gained(self) -> bool:
        """True if its level is above the one before by more than noise."""
        return self.before is not None and self.level is not None and self.level - self.before > self._bound

    def words(self) -> str:
        """``reward/mean back at 0.71, 0.74 before``."""
        how = "back at" if self.inside else "half of the way back, at"
        return f"{self.metric} {how} {number(self.level)}, {number(self.before)} before"

    def _undone(self, before: float, level: float) -> float | None:
        farthest = self.farthest
        if farthest is None:
            return None
        share = (level - farthest) / (before - farthest)
        if min(before, farthest, level) > 0.0:
            share = min(share, math.log(level / farthest) / math.log(before / farthest))
        return min(share, 1.0)


def _patient() -> Hold:
    return Hold(forgive=1)


@dataclass(slots=True)
class FindingLifecycle:
    """One episode: the finding as it was last reported, and what is told of it now."""

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
    """Its metric in the rows in which it was reported."""
    reported: int = 0
    """Rows in which it was."""

    def take(self, row: Mapping[str, float]) -> None:
        """Take the next row."""
        for way in self.ways:
            way.take(row)

    def hold(self, row: Mapping[str, float]) -> None:
        """Take notice of a row in which it was reported."""
        self.reported += 1
        value = row.get(self.finding.metric)
        if value is not None and math.isfinite(value):
            self.held.append(value)

    def follow(self, rows: Iterable[Row]) -> None:
        """Know the way of its metric and of the reward from these rows, and from then on."""
        onset, metric = self.finding.onset_step, self.finding.metric
        self.own = Way(metric, rows, onset)
        self.reward = self.own if metric == REWARD else Way(REWARD, rows, onset)

    @property
    def ways(self) -> tuple[Way, ...]:
        """Of its metric, and of the reward where that is another."""
        if self.own is None or self.reward is None:
            return ()
        return (self.own,) if self.own is self.reward else (self.own, self.reward)

    def worsens(self, finding: Finding) -> bool:
        """Take a finding; whether it is worse than any of the episode before."""
        self.finding, self.quiet, self.unread, self.gone = finding, 0, 0, None
        if self.over or finding.severity.rank <= self.peak.rank:
            return False
        self.severity = self.peak = finding.severity
        self.by_level = False
        self.lower.clear()
        return True

    def undone(self, share: float) -> bool:
        """True if so much of the way is undone: of its own metric and, where the reward fell, of that."""
        if self.own is None or self.own.undone is None or self.own.undone < share:
            return False
        return all(way.undone is not None and way.undone >= share for way in self.ways if way.fell)

    @property
    def inside(self) -> bool:
        """True if its metric, and the reward where it fell, are back inside the bands they left."""
        return self.own is not None and self.own.inside and all(way.inside for way in self.ways if way.fell)

    @property
    def stays(self) -> bool:
        """True if its metric is still out of the band it left though its detector is silent: nothing is over."""
        own, reward = self.own, self.reward
        if own is None or own.level is None or self.finding.severity is Severity.INFO:
            return False
        if reward is not None and reward is not own and reward.gained:
            return False
        if own.before is not None:
            return own.farthest is not None and not own.inside
        if own is reward or len(self.held) < LEVEL_ROWS:
            # A reward that stood still from the first row on is told of for that, and not for where it stood.
            return False
        held = list(self.held)
        left = abs(own.level - median(held)) > max(FAR * noise_of(held), FAR_SHARE * abs(median(held)))
        return not left

    @property
    def _paid_back(self) -> bool:
        """True if the reward fell with it and is on its way back."""
        reward = self.reward
        return reward is not None and reward is not self.own and reward.fell and (reward.undone or 0.0) >= HALF

    def look(self, step: ClosedStep, reported: Severity) -> Finding | None:
        """Follow it, as severe as its detector reports it; return what is to be told of it now, if anything."""
        if not self.followed:
            return self._eased(step, reported, half=False) or self._worse_again(step, reported)
        half = self.undone(HALF)
        self.relapse.update(step.step, not half)
        if self.over:
            return None
        told = self._eased(step, reported, half=half) or self._worse_again(step, reported)
        nearly = self.severity is not Severity.CRITICAL and self.undone(NEARLY) and self.inside
        self.nearly.update(step.step, nearly)
        if told is None and self.nearly.lasted(3, OVER_STEPS * self.patience):
            self.over, self.gone = True, self.nearly.since
            return self.ended(step, self.reason())
        return told

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
        return self._told(step, Stage.EASED, self.severity, f"no longer {was.value} at step {step.step}: {how}")

    def _worse_again(self, step: ClosedStep, reported: Severity) -> Finding | None:
        if reported.rank <= self.severity.rank or (self.by_level and not self.relapse.lasted(3, RELAPSE_STEPS)):
            return None
        self.severity, self.by_level = reported, False
        self.patience *= 2
        self.lower.clear()
        return self._told(step, Stage.WORSENED, reported, self.finding.message)

    @property
    def relapsed(self) -> bool:
        """True where it was over and is so again."""
        return self.over and self.relapse.lasted(3, RELAPSE_STEPS)

    def ended(self, step: ClosedStep, how: str) -> Finding:
        """Tell of its end; ``how``: the numbers by which it recovered, if any."""
        onset = self.finding.onset_step
        gone = step.step if self.gone is None else self.gone
        message = f"recovered at step {gone} after {gone - onset} steps: {how}" if how else f"gone since step {gone}"
        return self._told(step, Stage.RESOLVED, Severity.INFO, message)

    def reason(self) -> str:
        """The numbers by which it recovered; empty where none say so."""
        back = [way for way in self.ways if (way.undone or 0.0) >= HALF]
        if any(way.fell and way not in back for way in self.ways if way.metric == REWARD):
            return ""
        return "; ".join(dict.fromkeys(way.words() for way in back if way is self.own or way.fell))

    def _told(self, step: ClosedStep, stage: Stage, severity: Severity, message: str) -> Finding:
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
    """Tells of a finding when its condition begins to hold, when its severity changes, and when it is over.

    An episode ends after the condition was absent for ``QUIET_ROWS`` closed steps in a row, so a condition that
    flickers is one episode.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], FindingLifecycle] = {}
        self._rows: deque[Row] = deque(maxlen=REMEMBERED_ROWS)
        self._reasons: dict[str, str] = {}

    def forget_after(self, step: int) -> None:
        """Forget the rows after ``step``, which were undone: they are no level to come back to."""
        self._rows = deque((row for row in self._rows if row[0] <= step), maxlen=REMEMBERED_ROWS)

    def arrival(self, holding: Sequence[Finding]) -> list[Finding]:
        """Findings of a record that just arrived; begins or raises episodes, ends none."""
        return [told for finding in holding for told in self._raised(finding)]

    def closed(self, step: ClosedStep, holding: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Take a closed step; return what is to be told of it, and what holds at it, as bad as it is now."""
        self._rows.append((step.step, step.metrics))
        if not holding and not self._open:
            return [], []
        for episode in self._open.values():
            episode.take(step.metrics)
        told = self.arrival(holding)
        reported: dict[tuple[str, str], Severity] = {}
        for finding in holding:
            known = reported.setdefault(_key(finding), finding.severity)
            reported[_key(finding)] = max(known, finding.severity, key=lambda severity: severity.rank)
        for key, severity in reported.items():
            self._open[key].hold(step.metrics)
            told += self._looked(step, key, severity)
        told += self._ended(step, [key for key in self._open if key not in reported])
        holds = [self._as_it_is(finding) for finding in holding if self._stands(finding)]
        return told, [*holds, *self._staying(step)]

    def _staying(self, step: ClosedStep) -> Iterator[Finding]:
        """Of what its detector no longer says, what was told long enough and is not over."""
        for episode in self._open.values():
            if episode.quiet and not episode.over and episode.reported >= LONG_ROWS and episode.stays:
                finding = replace(episode.finding, step=step.step, attempt=step.attempt, seq=step.seq)
                yield replace(finding, severity=episode.severity)

    def standing(self, holding: Sequence[Finding]) -> list[Finding]:
        """Findings that hold and those of open episodes that are silent just now, as bad as they are."""
        now = {key: self._as_it_is(episode.finding) for key, episode in self._open.items() if not episode.over}
        for finding in holding:
            key = _key(finding)
            if key not in self._open:
                now[key] = finding
            elif key in now:
                now[key] = self._as_it_is(finding)
        return list(now.values())

    def reason(self, kind: str) -> str:
        """The numbers by which the newest episode of a kind eased or recovered; empty where none say so."""
        now = (self._reason(episode) for (_, of), episode in self._open.items() if of == kind)
        return next(filter(None, now), "") or self._reasons.get(kind, "")

    def _raised(self, finding: Finding) -> Iterator[Finding]:
        episode = self._open.get(_key(finding))
        if episode is None:
            self._begin(finding)
            yield finding
        elif episode.worsens(finding):
            self._follow(episode)
            yield replace(finding, stage=Stage.WORSENED)

    def _begin(self, finding: Finding) -> None:
        self._reasons.pop(finding.kind, None)
        self._open[_key(finding)] = episode = FindingLifecycle(finding, finding.severity, finding.severity)
        self._follow(episode)

    def _follow(self, episode: FindingLifecycle) -> None:
        episode.follow(self._rows)
        episode.followed = episode.severity is Severity.CRITICAL

    def _looked(self, step: ClosedStep, key: tuple[str, str], severity: Severity) -> Iterator[Finding]:
        episode = self._open[key]
        told = episode.look(step, severity)
        if told is not None:
            yield told
        elif episode.relapsed:
            since = episode.relapse.since
            again = replace(episode.finding, onset_step=max(episode.finding.onset_step, since or 0))
            self._begin(again)
            yield again

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
            told = episode.severity is not Severity.INFO or episode.finding.metric == REWARD  # a headline repeats these
            if not episode.over and told and not silent:
                yield episode.ended(step, self._reasons[key[1]])  # that nothing is logged any more is no recovery

    def _reason(self, episode: FindingLifecycle) -> str:
        """Its numbers."""
        return episode.reason()

    def _stands(self, finding: Finding) -> bool:
        return not self._open[_key(finding)].over

    def _as_it_is(self, finding: Finding) -> Finding:
        now = self._open[_key(finding)].severity
        return replace(finding, severity=now) if finding.severity.rank > now.rank else finding


def _key(finding: Finding) -> tuple[str, str]:
    return (finding.detector, finding.kind)
