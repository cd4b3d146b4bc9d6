"""Base of all detectors, and the set of detectors that judges each row (the metrics of one training step) of a run."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from rlwatch.catalogue import ROOM, reported_by
from rlwatch.detectors.index import LazyDetector
from rlwatch.error_boundary import Contained, described, log_message
from rlwatch.ports import Detector
from rlwatch.records import JSON, ClosedStep, Event, Finding, Severity
from rlwatch.stats import Thinned, Window

CARRY_ROWS = 10
"""Rows without any metric of a detector over which its findings persist, for metrics that are logged every few rows."""


class BaseDetector(ABC):
    """Base class of detectors: implements the :class:`~rlwatch.ports.Detector` protocol around :meth:`judge`.

    ``reads`` lists metrics of which at least one must be measured and finite for a row to be judged. A row without any
    of them leaves the findings as they are, for at most ``CARRY_ROWS`` rows. ``family`` and ``kinds`` come from the
    entries of the catalogue; a detector without an entry declares them itself.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    requires: ClassVar[tuple[tuple[str, ...], ...]]
    reads: ClassVar[tuple[str, ...]]
    shares: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that :meth:`listen` alone feeds, with every row; the detectors of a run share these
    objects. Each has ``update(step)``; with ``extend(rows)`` and ``wake()`` it may take a :class:`Stretch` at once.
    """
    follows: ClassVar[bool] = False
    """True if :meth:`listen` must be called for rows that :meth:`pass_over` has taken, unless :meth:`rests_over`."""
    families: ClassVar[tuple[str, ...]] = ()
    """Prefixes of metric names: in a row without any such metric, an overridden :meth:`measured` returns False."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        entries = reported_by(f"{cls.__module__}.{cls.__qualname__}".removeprefix(ROOM))
        if entries:
            cls.family, cls.kinds = entries[0].family, tuple(kind.name for kind in entries)

    def __init__(self) -> None:
        self._held: list[Finding] = []
        self._blank_rows = 0
        self._taken: ClosedStep | None = None
        self._taken_ahead = False
        """True during rows that :meth:`pass_over` has taken."""
        self._rows_left = 0
        """Rows to come of which :meth:`judge` has a part to do, because :meth:`pass_over` did the rest."""

    def share(self, common: Mapping[type, Any]) -> None:
        """Replace each attribute named in :attr:`shares` by the object of its type in ``common``; call it before any
        row.
        """
        for name in self.shares:
            own = getattr(self, name)
            setattr(self, name, common.get(type(own), own))

    def update(self, step: ClosedStep) -> list[Finding]:
        """Judge the next closed step and return the findings that hold now; the same step object again changes
        nothing.
        """
        if step is not self._taken:
            self.take(step, listening=True, measured=not self._taken_ahead and self.measured)
        return list(self._held)

    def take(
        self, step: ClosedStep, *, listening: bool, measured: bool | Callable[[ClosedStep], bool]
    ) -> list[Finding]:
        """Judge a closed step whose metrics :class:`DetectorSet` has looked up; return the findings, not to be
        modified.

        ``listening``: True if the row has metrics for :meth:`listen`. ``measured``: True if it has a metric in
        ``reads``, or the function that decides it.
        """
        if step is self._taken or (self._taken_ahead and not self.follows):
            return self._held
        self._taken = step
        if listening:
            self.listen(step)
        if measured is True or (measured is not False and measured(step)):
            self._blank_rows = 0
            self._held = self.judge(step)
        elif self._held:
            self._blank_rows += 1
            self._held = self._carried(step) if self._blank_rows <= CARRY_ROWS else []
        else:
            self._blank_rows += 1
        return self._held

    def arrival(self, step: ClosedStep) -> list[Finding]:  # noqa: ARG002  (the protocol's signature)
        """Return no findings: only the detector of non-finite values judges records before their step closes."""
        return []

    def pass_over(self, rows: Stretch) -> bool:  # noqa: ARG002  (most cannot)
        """Read all ``rows`` at once if certainly none has a finding; otherwise change nothing and return False.

        It is called while no finding holds, for rows with a metric in :attr:`reads`. The state afterwards must be the
        one that :meth:`judge` (and :meth:`listen`, unless :attr:`follows`) would leave after the rows one by one. The
        reward, and other state that detectors share, is still that before the rows. A detector may also do a part of
        the work, set ``_rows_left`` to the number of rows, and return False: its :meth:`judge` then does the rest row
        by row.
        """
        return False

    def listen_over(self, rows: Stretch) -> bool:  # noqa: ARG002
        """Listen to all ``rows`` at once, as :meth:`listen` would one by one; return False if it must.

        It is called for rows without a metric in :attr:`reads`. What detectors share is fed by :class:`DetectorSet`.
        """
        return type(self).listen is BaseDetector.listen

    def rests_over(self, rows: Stretch) -> bool:  # noqa: ARG002
        """Return True if :meth:`listen` would change nothing in all ``rows``, which :meth:`pass_over` has taken.

        Only a detector that :attr:`follows` is asked, once all detectors have read ahead.
        """
        return False

    def notice(self, event: Event) -> None:  # noqa: B027  (most have nothing to learn)
        """Ignore the event; a detector that learns from events, such as a resume, overrides this."""

    def listen(self, step: ClosedStep) -> None:
        """Read supporting metrics from every row; by default, feed the row to the attributes named in
        :attr:`shares`.
        """
        for name in self.shares:
            getattr(self, name).update(step)

    def rests(self, reads: bool) -> bool:
        """Return True if the detector certainly has no finding at the next row.

        ``reads``: True if the row has a metric that the detector reads.
        """
        return not self._held and (self._taken_ahead or not reads)

    def measured(self, step: ClosedStep) -> bool:
        """Return True if the row has a finite value of one of the metrics in ``reads``, so that it can be judged."""
        return finite(step, *self.reads) is not None

    @abstractmethod
    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge a row in which one of the metrics in ``reads`` is finite; return the findings that hold now."""

    def _carried(self, step: ClosedStep) -> list[Finding]:
        fresh = [replace(f, step=step.step, attempt=step.attempt, seq=step.seq) for f in self._held]
        return [finding for finding in fresh if finding.onset_step <= finding.step]

    def finding(
        self,
        step: ClosedStep,
        kind: str,
        severity: Severity,
        message: str,
        *,
        onset: int | None = None,
        metric: str = "",
        score: float | None = None,
        baseline: float | None = None,
        evidence: Mapping[str, JSON] | None = None,
    ) -> Finding:
        """Return a well-formed finding of this detector at ``step``.

        ``onset``: first step of the problem, at most ``step``. ``score``: how far beyond its limit,
        raised to at least 1; None if not finite. ``baseline``: the normal level of the metric. ``evidence``: further
        numbers, by name.
        """
        return Finding(
            detector=self.name,
            kind=kind,
            severity=severity,
            step=step.step,
            onset_step=step.step if onset is None else min(onset, step.step),
            message=message,
            evidence=evidence or {},
            metric=metric,
            family=self.family,
            score=max(score, 1.0) if score is not None and math.isfinite(score) else None,
            baseline=baseline if baseline is not None and math.isfinite(baseline) else None,
            attempt=step.attempt,
            seq=step.seq,
        )


class _Way(Enum):
    """Ways in which a detector processes a row with certain metric names."""

    NOTHING = "nothing, but for what it holds"
    JUDGE = "judge it: it holds a reading"
    LISTEN = "listen to it: it holds no reading"
    BOTH = "listen to it, and judge it"
    ASK = "ask the detector itself"


class DetectorSet:
    """The detectors of one run; each row goes only to the detectors that read one of its metrics.

    A detector that raises is logged, recorded in ``broken`` with the reason, and removed, because its state is unknown.
    The others continue.
    """

    def __init__(self, detectors: Iterable[Detector]) -> None:
        self._detectors = tuple(detectors)
        self._types = tuple(map(type, self._detectors))
        self._lazy = tuple(one for one in self._detectors if isinstance(one, LazyDetector))
        """Those that no row has concerned yet."""
        self.broken: dict[str, str] = {}
        self._known: tuple[dict[str, tuple[str, ...]], tuple[_Way, ...]] | None = None
        """Beginning of the newest row, and the ways for it: the next row mostly has the same names."""
        self._asleep: list[BaseDetector] = []
        """Detectors that have taken the rows up to"""
        self._until: ClosedStep | None = None
        """this one, inclusive."""
        self._awake: list[tuple[Detector, _Way]] = []
        """The other detectors, with their ways for these rows."""
        self._read_ahead = False
        """True if what the detectors share has taken these rows as well."""
        self.longest = USUAL
        """Most rows of the next stretch, twice those of the last one while hardly any detector judges single rows."""
        own = [detector for detector in self._detectors if isinstance(detector, BaseDetector)]
        self._common = list({id(part): part for one in own for part in map(one.__getattribute__, one.shares)}.values())

    def __iter__(self) -> Iterator[Detector]:
        return iter(self._detectors)

    def update(self, step: ClosedStep) -> list[Finding]:
        """Judge a closed step with each detector; return the findings that hold now, in the order of the detectors."""
        if not self._read_ahead:
            for part in self._common:
                part.update(step)
        found: list[Finding] = []
        ways = self._ways(step) if self._until is None else ()  # it may load detectors, so it comes first
        each = zip(self._detectors, ways, strict=True) if self._until is None else iter(self._awake)
        while not self._given(each, step, found):
            pass
        if step is self._until:
            self._wake()
        return found

    def ahead(self, steps: Sequence[ClosedStep]) -> None:
        """Let each detector read the rows ``steps`` at once, if it can; then give them to :meth:`update` one by one, in
        order.

        ``steps``: one of the stretches that :func:`~rlwatch.detectors.base.stretches` returns.
        """
        self._wake()
        if len(steps) < SHORTEST or steps[0].numbers is not steps[0].metrics:
            return
        of_each = self._ways(steps[0])  # it may load detectors, so it comes first
        rows, ways = Stretch(steps), list(zip(self._detectors, of_each, strict=True))
        for detector, way in ways:
            if way is not _Way.NOTHING and isinstance(detector, BaseDetector):
                with Contained(partial(self._leave_out, detector, steps[0])):
                    self._put_to_sleep(detector, rows, way)
        asleep, self._until = set(map(id, self._asleep)), steps[-1]
        listening = set[int]()
        for detector in self._asleep:
            if detector.follows:
                with Contained(partial(self._leave_out, detector, steps[0])):
                    if not detector.rests_over(rows):
                        listening.add(id(detector))
        self._awake = [
            (detector, _Way.LISTEN if id(detector) in asleep else way)
            for detector, way in ways
            if (id(detector) not in asleep or id(detector) in listening)
            and detector.name not in self.broken
            and not (way is _Way.NOTHING and not detector._held)  # type: ignore[attr-defined]  # noqa: SLF001
        ]
        judging = [detector for detector, _ in self._awake if id(detector) not in asleep]
        self.longest = min(2 * self.longest, LONGEST) if len(judging) <= FEW else USUAL
        needed = any(isinstance(detector, BaseDetector) and detector.shares for detector in judging)
        if self._common and not needed and all(hasattr(part, "extend") for part in self._common):
            for part in self._common:
                part.extend(rows)
            self._read_ahead = True

    def _put_to_sleep(self, detector: BaseDetector, rows: Stretch, way: _Way) -> None:
        take = detector.listen_over if way is _Way.LISTEN else detector.pass_over
        if not detector._held and take(rows):  # noqa: SLF001
            detector._taken_ahead = True  # noqa: SLF001
            self._asleep.append(detector)

    def _wake(self) -> None:
        for detector in self._asleep:
            detector._taken_ahead, detector._taken, detector._blank_rows = False, self._until, 0  # noqa: SLF001
        for part in self._common if self._until is not None else ():
            if hasattr(part, "wake"):
                part.wake()
        self._asleep, self._until, self._awake, self._read_ahead = [], None, [], False

    def _ways(self, step: ClosedStep) -> tuple[_Way, ...]:
        """Return the way of each detector for the row ``step``; load those that it is the first to concern."""
        whole = step.numbers is step.metrics
        if whole and self._known is not None and self._known[0] is step.beginning:
            return self._known[1]
        names, absent = tuple(step.metrics), self._loaded_for(step)
        ways = _ways(self._types, names if whole else tuple(step.numbers), names)
        if absent:  # the next row tries again
            return tuple(_Way.ASK if id(one) in absent else way for one, way in zip(self._detectors, ways, strict=True))
        if whole:
            self._known = step.beginning, ways
        return ways

    def _loaded_for(self, step: ClosedStep) -> set[int]:
        """Load the detectors that the row ``step`` is the first to concern; return the ``id`` of each that cannot be
        loaded now.
        """
        absent: set[int] = set()
        for lazy in [one for one in self._lazy if one.entry.concerns(step.metrics)]:
            with Contained(partial(self._leave_out, lazy, step)):
                made = lazy.loaded()
                if made is None:
                    absent.add(id(lazy))
                else:
                    self._put_in_place(lazy, made)
        return absent

    def _put_in_place(self, lazy: LazyDetector, made: Detector) -> None:
        """Put the loaded detector ``made`` in the place of ``lazy``."""
        at = self._detectors.index(lazy)
        self._detectors = (*self._detectors[:at], made, *self._detectors[at + 1 :])
        self._types = tuple(map(type, self._detectors))
        self._lazy = tuple(one for one in self._lazy if one is not lazy)
        self._known = None

    def _given(self, each: Iterator[tuple[Detector, _Way]], step: ClosedStep, found: list[Finding]) -> bool:
        """Give the step to one detector after another; return False where one raised, so that the rest is still due."""
        at = [*self._detectors[:1]]
        with Contained(lambda error: self._leave_out(at[0], step, error)):
            self._give(each, step, found, at)
            return True
        return False

    def _leave_out(self, detector: Detector, step: ClosedStep, error: Exception) -> None:
        self.broken[detector.name] = reason = f"failed at step {step.step} ({described(error)}) and was disabled"
        self._detectors = tuple(one for one in self._detectors if one is not detector)
        self._types = tuple(map(type, self._detectors))
        self._lazy = tuple(one for one in self._lazy if one is not detector)
        self._known = None
        self._awake = [each for each in self._awake if each[0] is not detector]
        log_message(logging.WARNING, "detector %s %s; other detectors continue", detector.name, reason)

    @staticmethod
    def _give(
        each: Iterator[tuple[Detector, _Way]], step: ClosedStep, found: list[Finding], at: list[Detector]
    ) -> None:
        nothing, ask, judge, listen = _Way.NOTHING, _Way.ASK, _Way.JUDGE, _Way.LISTEN
        for detector, way in each:
            at[0] = detector
            if way is nothing:
                if detector._held:  # type: ignore[attr-defined]  # noqa: SLF001
                    found += detector.update(step)
            elif way is ask:
                found += detector.update(step)
            else:
                found += detector.take(step, listening=way is not judge, measured=way is not listen)  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _ways(types: tuple[type, ...], numbers: tuple[str, ...], names: tuple[str, ...]) -> tuple[_Way, ...]:
    """Return the way of each detector for a row with these names, cached: rows of a run mostly have the same names."""
    there, finite_there = set(names), set(numbers)
    return tuple(_way(detector, finite_there, there) for detector in types)


def reading(detectors: tuple[Detector, ...], step: ClosedStep) -> tuple[Detector, ...]:
    """Return those of the ``detectors`` that read a metric of the row ``step``."""
    ways = _ways(tuple(map(type, detectors)), tuple(step.numbers), tuple(step.metrics))
    return tuple(detector for detector, way in zip(detectors, ways, strict=True) if way is not _Way.NOTHING)


def _way(detector: type, numbers: set[str], names: set[str]) -> _Way:
    if issubclass(detector, LazyDetector):
        return _Way.NOTHING
    if not issubclass(detector, BaseDetector):
        return _Way.ASK
    if detector.update != BaseDetector.update:
        return _Way.ASK
    listens = detector.listen != BaseDetector.listen
    if detector.measured != BaseDetector.measured:
        never = detector.families and not any(name.startswith(detector.families) for name in names)
        return _Way.NOTHING if never and not listens else _Way.ASK
    read = not numbers.isdisjoint(detector.reads)
    if listens:
        return _Way.BOTH if read else _Way.LISTEN
    if read:
        return _Way.JUDGE
    return _Way.NOTHING if names.isdisjoint(detector.reads) else _Way.LISTEN


def finite(step: ClosedStep, *names: str) -> float | None:
    """Return the first finite value among the metrics ``names`` in the row ``step``; None if there is none."""
    get = step.numbers.get
    for name in names:
        value = get(name)
        if value is not None:
            return value
    return None


def members(step: ClosedStep, family: str) -> tuple[str, ...]:
    """Return the row's metric names that begin with ``family``, in order, cached over rows with the same names."""
    found = step.beginning.get(family)
    if found is None:
        found = step.beginning[family] = tuple(name for name in step.metrics if name.startswith(family))
    return found


def rounded(values: Mapping[str, float | int | None]) -> dict[str, JSON]:
    """Return the finite values rounded to six significant digits, for the evidence of a finding; others are left
    out.
    """
    return {k: float(f"{v:.6g}") for k, v in values.items() if v is not None and math.isfinite(v)}


# Recognise a series that has stopped rising: with certainty, noise included, not merely without a visible rise.

FEWEST, FIRST = 12, 4
"""Fewest points since a step that can show that a series moved, and how many of them count as the first."""
STILL = 0.1
"""Share of the range of its rows that a flat series cannot have gained, noise included."""
ERRORS = 2.0
"""Standard errors that are allowed for noise."""
GOAL_ROOM = 0.75
"""Share of the reachable maximum below which a flat series has much left to gain."""


class SeriesHistory:
    """Level, range and course of a reward, or of one of its parts, over a run, in a few dozen points."""

    def __init__(self) -> None:
        self._now = Window(rows=20, steps=20, least=5)
        self._points = Thinned(points=64)
        self.low, self.high = math.inf, -math.inf
        self._course: tuple[int, list[float], list[float]] = (-1, [], [])
        """Version of the points, their steps, and their values."""
        self._sums: tuple[int, ExactSums] = (-1, ExactSums([]))
        """Version of the points, and sums of their values."""
        self._of: tuple[int, int, float, float] | None = None
        """Arguments of the last call of :meth:`gained`, and"""
        self._answer = (0.0, 0.0)
        """its result, cached: points are few, and rows many."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the sums out of checkpoints: they follow from the points, in integers of hundreds of digits."""
        return self.__dict__ | {"_sums": (-1, ExactSums([]))}

    def update(self, step: int, value: float) -> None:
        """Read the series' next finite value, at a step."""
        self.low, self.high = min(self.low, value), max(self.high, value)
        self._now.update(step, value)
        self._points.update(step, float(step), value)

    @property
    def level(self) -> float:
        """Median of the metric's last rows; 0 if there are too few."""
        return self._now.get() or 0.0

    @property
    def share(self) -> bool:
        """True if all values of the metric lie in [0, 1], so that it may be a share of the answers."""
        return self.low >= 0.0 and self.high <= 1.0

    @property
    def room(self) -> bool:
        """True if the metric can still rise: its level is well below its maximum.

        The maximum is 1 for a share, otherwise the best row so far if that is above 0.
        """
        return self.level < GOAL_ROOM * (1.0 if self.share else max(self.high, 0.0)) and self.high > 0.0

    def climbed(self, least: float) -> float | None:
        """Return the step at which the series was last halfway between its lowest point and its level.

        None if these are less than ``least`` apart, or if there are too few points.
        """
        _, steps, values = self._known()
        if len(values) < FEWEST or self.level - min(values) < least:
            return None
        half = (self.level + min(values)) / 2.0
        return max((step for step, value in zip(steps, values, strict=True) if value < half), default=None)

    def _known(self) -> tuple[int, list[float], list[float]]:
        """Return version, steps and values of the points, oldest first."""
        if self._course[0] != self._points.version:
            self._course = (self._points.version, *self._points.get())
        return self._course

    def gained(self, since: float) -> tuple[float, float] | None:
        """Return lower and upper bounds on the gain since step ``since``, as shares of the range; None with too few
        points.
        """
        version, steps, values = self._known()
        begins = bisect_left(steps, since)
        if len(values) - begins < FEWEST or self.high <= self.low:
            return None
        of = (version, begins, self.low, self.high)
        if of == self._of:
            return self._answer
        if self._sums[0] != version:
            self._sums = version, ExactSums(values)
        of_points, end, scale = self._sums[1], len(values), self.high - min(self.low, 0.0)
        half = begins + (end - begins) // 2
        # The halves of a straight line are half of its rise apart in the mean; an early rise shows in the first points.
        last = of_points.of(half, end)
        slow, early = _change(of_points.of(begins, half), last), _change(of_points.of(begins, begins + FIRST), last)
        self._of, self._answer = of, (min(2.0 * slow[0], early[0]) / scale, max(2.0 * slow[1], early[1]) / scale)
        return self._answer


def _change(first: Mean, last: Mean) -> tuple[float, float]:
    """Return the bounds of the difference of two means, noise included."""
    noise = ERRORS * math.sqrt(first.variance / first.points + last.variance / last.points)
    change = last.mean - first.mean
    return change - noise, change + noise


class Mean(NamedTuple):
    """Mean and variance of so many ``points``, both rounded as those of Python's ``statistics`` are."""

    points: int
    mean: float
    variance: float


class ExactSums:
    """Sums of finite values and of their squares from the first one on, from which those of any part follow.

    Floats are integers over powers of two, so over the largest of these powers the sums are exact.
    """

    def __init__(self, values: Sequence[float]) -> None:
        parts = [value.as_integer_ratio() for value in values]
        over = self._over = max((below for _, below in parts), default=1)
        whole = [above * (over // below) for above, below in parts]
        self._sums = list(accumulate(whole, initial=0))
        self._squares = list(accumulate([each * each for each in whole], initial=0))

    def of(self, begins: int, ends: int) -> Mean:
        """Return mean and variance of the values from the place ``begins`` until ``ends``, at least two.

        The variance is infinite, and the mean 0, where one of them is beyond a float.
        """
        count, over = ends - begins, self._over
        total, squares = self._sums[ends] - self._sums[begins], self._squares[ends] - self._squares[begins]
        try:
            variance = (count * squares - total * total) / (count * (count - 1) * over * over)
            return Mean(count, total / over / count, variance)
        except OverflowError:
            return Mean(count, 0.0, math.inf)


# Stretches of consecutive rows that a detector may read at once: most cannot have a finding, and one look shows it.
#
# A detector that can decide this for many rows overrides :meth:`~rlwatch.detectors.base.BaseDetector.pass_over`, which
# compares the extremes of the rows with the detector's limits. If they are on the safe side, no row would have had a
# finding, and the state after the rows follows from the last of them. Otherwise the rows are judged one by one, as
# live rows are.

LONGEST, USUAL, SHORTEST = 256, 64, 6
"""Most rows of a stretch of a calm run, and of any other run, so that one odd row affects few others; and fewest rows
that are worth reading at once.
"""
FEW = 2
"""Detectors that may have judged the rows of a stretch one by one where the next one may be longer."""
BEGINNING = 24
"""Rows of a run after which a stretch ends: most baselines are complete then, and no row before can be calm."""


class Stretch:
    """Consecutive rows (metrics of one step each) of one attempt, with the same metrics, all finite, at ascending
    steps.

    Parameters ---------- rows
        The rows, at least one; :func:`stretches` finds them.
    """

    def __init__(self, rows: Sequence[ClosedStep]) -> None:
        self.rows = rows
        self.metrics = frozenset(rows[0].metrics)
        """Names of the metrics."""
        self._columns: dict[str, list[float]] = {}

    @cached_property
    def steps(self) -> list[int]:
        """Training step of each row, ascending."""
        return [row.step for row in self.rows]

    def column(self, name: str) -> list[float]:
        """Return the values of the metric ``name``, one per row; empty if the rows do not have the metric."""
        if name not in self.metrics:
            return []
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = [row.metrics[name] for row in self.rows]
        return known

    def first(self, *names: str) -> list[float]:
        """Return the values of the first of the metrics ``names`` that the rows have, one per row; empty if they have
        none.
        """
        return next((self.column(name) for name in names if name in self.metrics), [])


def stretches(
    steps: Sequence[ClosedStep], before: int = 0, longest: Callable[[], int] = lambda: USUAL
) -> Iterator[Sequence[ClosedStep]]:
    """Cut closed ``steps``, which are in order, into stretches; a row that fits no neighbour is one by itself.

    ``before``: number of rows of the run that were judged before. ``longest``: returns the most rows of the next
    stretch.

    >>> rows = [ClosedStep(step, {"a": 0.5}) for step in (1, 2, 3, 3, 4)]
    >>> [[row.step for row in part] for part in stretches(rows)]
    [[1, 2, 3], [3, 4]]
    """
    begins, most = 0, longest()
    for at in range(1, len(steps) + 1):
        ends = at == len(steps) or at - begins == most or before + at == BEGINNING
        if ends or not _go_on(steps[at - 1], steps[at]):
            yield steps[begins:at]
            begins, most = at, longest()


def _go_on(before: ClosedStep, row: ClosedStep) -> bool:
    """Return whether a row belongs to the stretch of the row before it."""
    finite = row.numbers is row.metrics and before.numbers is before.metrics
    return finite and row.beginning is before.beginning and row.attempt == before.attempt and row.step > before.step
