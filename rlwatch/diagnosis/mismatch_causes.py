"""Causes of a mismatch between trainer and rollout engine, by the shape of the gap and its course over the steps.

The gap is d, the log-prob of a token in the trainer minus that in the engine. ``rlwatch/tensors/gap_shape.py`` measures
its shape in each batch and derives the shape that each cause produces. Truncated sampling, a temperature and an error
that adds up along a response have distinct shapes. Rounding and old weights have the same shape, noise on both sides,
and differ only over time. Old weights make a gap that grows with their age and falls at each sync; rounding is there
before the first update, and remains. Where neither is visible, no cause is named, but the metrics that would have to be
logged are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, pairwise

from rlwatch.diagnosis.turns import ChangeSource, KnobChange
from rlwatch.wording import number

ENGINE = "rollout_engine"
"""Entry of ``knobs.toml`` to which these causes belong."""
GAP, WEIGHT = "mismatch/logp_absdiff", "mismatch/weight_mean"
ABOVE, LATE = "mismatch/above_share", "mismatch/late_ratio"
TEMPERATURE, EXPLAINED = "mismatch/engine_temperature", "mismatch/temperature_share"
SLOPE, ALIGNED = "mismatch/logp_slope", "mismatch/logp_corr"
PER_VERSION, AGE, SYNC = "mismatch/absdiff_per_version", "staleness/mean", "engine/weight_sync"
DIFFER = "mismatch/weights_differ"
TEMPLATE_RATIO, TEMPLATE_SHARE = "mismatch/template_ratio", "mismatch/template_share"
ROUTED, MOVED = "mismatch/routing_ratio", "mismatch/routing_token_frac"
GAP_METRICS = frozenset(
    {
        GAP, WEIGHT, ABOVE, LATE, TEMPERATURE, EXPLAINED, SLOPE, ALIGNED, PER_VERSION, AGE, SYNC, DIFFER,
        TEMPLATE_RATIO, TEMPLATE_SHARE, ROUTED, MOVED,
    }
)  # fmt: skip
"""Canonical metrics that :class:`GapTracker` reads."""


class MismatchCause(StrEnum):
    """Cause of a mismatch between trainer and rollout engine; ``not separable`` where the logged metrics do not show
    it.
    """

    TRUNCATED = "truncated sampling"
    TEMPERATURE = "temperature"
    STALE = "stale or partial weights"
    ALONG = "error that adds up along the response"
    PRECISION = "precision (dtype, kernels, quantised weights or cache)"
    TEMPLATE = "tokenizer or template"
    ROUTER = "expert routing"
    UNCLEAR = "not separable"


FIRST_ACTIONS: Mapping[MismatchCause, tuple[str, ...]] = {
    MismatchCause.TRUNCATED: ("lower-temperature",),
    MismatchCause.TEMPERATURE: ("lower-temperature",),
    MismatchCause.STALE: ("repair-sync",),
    MismatchCause.ALONG: ("fp32-head", "fp16"),
    MismatchCause.PRECISION: ("fp32-head", "fp16"),
    MismatchCause.TEMPLATE: ("token-ids",),
    MismatchCause.ROUTER: ("routing-replay",),
}
"""Actions of ``actions.toml`` that come first where the cause is known."""

LEAST = 0.01
"""Mean |d| in nats per token from which on a cause is looked for; bf16 samplers show 0.0014 to 0.008."""
NEWEST, LASTING = 5, 3
"""Number of rows whose medians are used, and number of rows for which a cause must persist before it counts."""
HISTORY = 40
"""Number of rows over which the gap is compared with the age of weights and with steps."""
ONE_SIDED = 0.1
"""Share of the gap above 0 up to which it lies on one side: exactly 0 for truncation, .34 to .5 for everything else."""
KEPT = 0.5
"""Smallest shortfall of the mean weight, in units of 1 - exp(-|d|). It is 0 for an engine that can
sample all tokens.
"""
ONE_TEMPERATURE, LIKE_TEMPERATURE, ANOTHER = 0.8, 0.75, 0.02
"""Share of the squared gap that a temperature explains; |correlation| without an entropy; least |log T|."""
GROWS, ERRORS = 1.1, 2.0
"""Smallest ratio of the gap late in a response to that early in it, as the mean of the rows less so many standard
errors, from which on the gap grows along responses. For other causes it was 0.94 to 1.06.
"""
AT_TEMPLATES, THERE = 3.0, 0.2
"""Gap of template and control tokens over that of the others, at equal room, and their least share of the gap."""
AFTER_MOVED, OF_MOVED = 2.0, 0.28
"""Gap after tokens that went to other experts over that of the others, at equal room, and the least share of the gap
that lies there. Rounded weights move few tokens, and the gap lies elsewhere: .15 and less, .44 and more for routers."""
WITH_AGE, FEWEST = 0.8, 10
"""Smallest correlation of gap and age over the rows, and smallest number of rows for it."""
OF_AGE = 0.5
"""Share of the gap that must vanish at age 0."""
FALL, TEETH, TOOTH, RISING = 0.6, 3, 2, 0.7
"""Factor of a fall from row to row, falls that make a sawtooth, rows between two falls, and share of other rows that
rise.
"""
RAMP, AWAY, RAMP_ROWS, RAMP_RISING = 3.0, 2.5, 8, 0.7
"""Factors of a steady rise over the run's first rows and over its own first row, its number of rows, and its rank
correlation with the step.
"""
STEP_UP, HALFWAY = 0.5, 0.45
"""Largest share of the rise in its first row, and smallest share in half of its rows: .5 for linear growth, .39 or
less for exponential growth.
"""
STEADY = 2.0
"""Factor within which a gap counts as constant."""
FRESH = 0.5
"""Age in policy versions up to which samples count as drawn from the newest weights."""
MOST_SEGMENTS = 16
TINY = 1e-12
"""Sum of squares below which nothing varies."""
LARGEST = 1e6
"""Largest valid value of these metrics; a larger one is an error of measurement, and shows no shape."""


@dataclass(frozen=True, slots=True)
class GapCause:
    """A cause of the gap between trainer and rollout engine, and a ``text`` with the numbers that show it."""

    cause: MismatchCause
    text: str

    def joined(self, shown: Iterable[GapCause]) -> GapCause:
        """Return the cause with those of ``shown`` named in its text, which the shape of the gap shows as well.

        Truncated sampling sharpens the engine's distribution, so that it may look like a temperature, too.
        """
        alike = {self.cause, MismatchCause.TEMPERATURE if self.cause is MismatchCause.TRUNCATED else self.cause}
        others = [f"{other.cause}, too: {other.text}" for other in shown if other.cause not in alike]
        return GapCause(self.cause, "; ".join([self.text, *others])) if others else self


@dataclass(slots=True)
class GapTracker:
    """Follows the gap between trainer and rollout engine row by row, and records which cause it shows over which steps.

    Memory is bounded.
    """

    rows: deque[tuple[int, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    base: list[float] = field(default_factory=list)
    segments: deque[KnobChange] = field(default_factory=lambda: deque(maxlen=MOST_SEGMENTS))
    synced: int | None = None
    always_synced: bool = True
    candidate: tuple[MismatchCause, int, int] | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the row of ``step`` (canonical metric -> value); rows without a gap and invalid or too large values are
        skipped.
        """
        known = {name: value for name in GAP_METRICS if abs(value := metrics.get(name, math.nan)) <= LARGEST}
        gap = known.get(GAP, -1.0)
        if known.get(SYNC, 0.0) > 0:
            self.synced = step
        if gap < 0:
            return
        self.always_synced = self.always_synced and self.synced == step
        if self.synced is not None:
            known["since"] = float(step - self.synced)
        self.rows.append((step, known))
        self.newest.append(gap)
        if len(self.base) < NEWEST:
            self.base.append(gap)
        self._note(step, self.judged())

    def _note(self, step: int, verdict: GapCause | None) -> None:
        """Begin a segment once a cause has persisted for a few rows; otherwise extend the newest."""
        if verdict is None:
            self.candidate = None
            return
        cause = verdict.cause
        first, rows = (step, 0) if self.candidate is None or self.candidate[0] is not cause else self.candidate[1:]
        self.candidate = (cause, first, rows + 1)
        if rows + 1 < LASTING:
            return
        measured, path = ChangeSource.MEASURED, ((first, 1.0),)
        segment = KnobChange(ENGINE, cause.value, first, 0.0, path, measured, until=step, text=verdict.text)
        if self.segments and (self.segments[-1].name, self.segments[-1].step) == (segment.name, first):
            self.segments[-1] = segment
        else:
            self.segments.append(segment)

    @property
    def turns(self) -> tuple[KnobChange, ...]:
        """The causes that the gap showed over time, each from ``step`` to ``until``."""
        return tuple(self.segments)

    # What the newest rows show.

    def judged(self) -> GapCause | None:
        """Return the cause that the newest rows show; None where there is hardly a gap."""
        if len(self.newest) < LASTING or max(self.newest) < LEAST:
            return None
        last = [row for _, row in islice(reversed(self.rows), NEWEST)]
        now = {name: middle([row[name] for row in last if name in row]) for name in {n for row in last for n in row}}
        teeth = self._teeth()
        if now[GAP] < LEAST and not teeth:
            return None
        first = (
            template(now)
            or truncated(now)
            or self._compared(last)
            or self._aged(now, teeth)
            or temperature(now)
            or router(now)
            or self._ramp(now)
            or self._along()
            or self._rounded(now)
            or GapCause(MismatchCause.UNCLEAR, "")
        )
        return first.joined(found for rule in SHAPES if (found := rule(now)) is not None)

    def _compared(self, last: Sequence[Mapping[str, float]]) -> GapCause | None:
        """Detect old weights directly, where the engine's weights were compared with the trainer's after each sync."""
        seen = [row[DIFFER] for row in last if DIFFER in row]
        if not seen or seen[0] <= 0.0:
            return None
        return _stale(f"{seen[0]:.0%} of the engine's tensors differed from the trainer's after the newest weight sync")

    def _equal(self) -> bool:
        """Return whether the newest rows were sampled by the weights that they train: compared in each
        row, and equal.
        """
        last = [row for _, row in islice(reversed(self.rows), NEWEST)]
        return len(last) == NEWEST and all(row.get(DIFFER) == 0.0 and row.get(AGE, 0.0) <= FRESH for row in last)

    def _aged(self, now: Mapping[str, float], teeth: int) -> GapCause | None:
        """Detect old weights, by their age or by the falls at each sync."""
        per, age = now.get(PER_VERSION), now.get(AGE, 0.0)
        if per is not None and age > 0 and per * age >= OF_AGE * now[GAP]:
            share = min(per * age / now[GAP], 1.0)
            return _stale(f"|d| grows by {number(per, 3)} nats a policy version within a batch, {share:.0%} of the gap")
        for name, words in ((AGE, "policy versions since sampling"), ("since", "steps since the last weight sync")):
            if name == AGE or not self.always_synced:
                found = self._with(name, words)
                if found is not None:
                    return found
        falls = f"|d| rose from row to row and fell by {1 - FALL:.0%} or more {teeth} times"
        return _stale(falls) if teeth else None

    def _with(self, name: str, words: str) -> GapCause | None:
        pairs = [(row[name], row[GAP]) for _, row in self.rows if name in row]
        if len(pairs) < FEWEST:
            return None
        mean_age, mean_gap = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        aa = sum((age - mean_age) ** 2 for age, _ in pairs)
        gg = sum((gap - mean_gap) ** 2 for _, gap in pairs)
        ag = sum((age - mean_age) * (gap - mean_gap) for age, gap in pairs)
        if aa < TINY or gg < TINY or ag < WITH_AGE * math.sqrt(aa * gg) or ag / aa * mean_age < OF_AGE * mean_gap:
            return None
        r, slope = ag / math.sqrt(aa * gg), ag / aa
        return _stale(f"|d| follows the {words} (correlation {r:.2f}, {number(slope, 3)} nats each)")

    def _teeth(self) -> int:
        """Return the number of falls in a sawtooth, each from a gap that counts and after rising rows, or 0."""
        gaps = [row[GAP] for _, row in self.rows]
        falls = [place for place in range(1, len(gaps)) if gaps[place] <= FALL * gaps[place - 1] >= FALL * LEAST]
        if len(falls) < TEETH or any(later - place < TOOTH for place, later in pairwise(falls)):
            return 0
        first = max(1, 2 * falls[0] - falls[1])  # as many rows before the first fall as from it to the second
        moves = [gaps[place] > gaps[place - 1] for place in range(first, len(gaps)) if place not in falls]
        return len(falls) if sum(moves) >= RISING * len(moves) else 0

    def _ramp(self, now: Mapping[str, float]) -> GapCause | None:
        """Detect weights that do not arrive: a steady rise from the first rows, with no jump and not exponential.

        Other faults also grow slowly. Without the shape of the gap none of them is ruled out.
        """
        if len(self.base) < NEWEST or ABOVE not in now or self._equal():
            return None
        low = middle(self.base)
        places = [(step, row[GAP]) for step, row in self.rows]
        quiet = [place for place, (_, gap) in enumerate(places) if gap <= 1.5 * low]
        if not quiet:
            return None
        rise = places[quiet[-1] + 1 :]
        if len(rise) < RAMP_ROWS:
            return None
        top = middle([gap for _, gap in rise[-LASTING:]])
        begun = rise[0][1]
        if top < max(RAMP * low, AWAY * begun) or begun - low > STEP_UP * (top - low):
            return None
        half = middle([gap for _, gap in rise[len(rise) // 2 - 1 : len(rise) // 2 + 2]])
        if half - begun < HALFWAY * (top - begun) or rank_correlation([gap for _, gap in rise]) < RAMP_RISING:
            return None
        return _stale(
            f"|d| has grown with the steps since step {rise[0][0]}, from {number(low, 3)} to {number(top, 3)} nats, "
            "neither at once nor exponentially, and never fell back"
        )

    def _late(self) -> tuple[float, float]:
        """Return the mean ratio of late to early gap over rows whose gap counts, and its standard error; 1 and 0 if
        unknown.
        """
        found = [row[LATE] for _, row in self.rows if row[GAP] >= LEAST and LATE in row]
        if len(found) < NEWEST:
            return 1.0, 0.0
        mean = sum(found) / len(found)
        return mean, math.sqrt(sum((one - mean) ** 2 for one in found) / (len(found) - 1) / len(found))

    def _along(self) -> GapCause | None:
        """Detect a gap that grows along responses."""
        late, error = self._late()
        if late - ERRORS * error < GROWS:
            return None
        text = f"the gap of the second half of responses is {number(late, 3)} times that of the first"
        return GapCause(MismatchCause.ALONG, f"{text}, at equal probability (standard error {number(error, 2)})")

    def _rounded(self, now: Mapping[str, float]) -> GapCause | None:
        """Detect rounding: noise on both sides that was there before the weights changed, so they did not cause it."""
        above, (late, _) = now.get(ABOVE), self._late()
        if above is None or above < 2 * ONE_SIDED or now.get(EXPLAINED, 0.0) > 1 - ONE_TEMPERATURE or late >= GROWS:
            return None
        gaps = [row[GAP] for _, row in self.rows]
        if self._equal():
            text = f"{above:.0%} of the gap lies above 0 and it does not grow along responses ({number(late, 3)})"
            return GapCause(MismatchCause.PRECISION, f"{text}; the weights were equal after each of {NEWEST} syncs")
        shape = f"{above:.0%} of the gap lies above 0 and it does not grow along responses ({number(late, 3)})"
        lower = [place for place, gap in enumerate(gaps) if gap < now[GAP] / STEADY]
        if self.base[0] >= now[GAP] / STEADY and not lower and max(gaps) <= STEADY * now[GAP]:
            return GapCause(MismatchCause.PRECISION, f"{shape}; it was there in the run's first row, and stayed")
        since = lower[-1] + 1 if lower else 0
        lasted = len(gaps) - since >= NEWEST
        at_once = lasted and (since == 0 or gaps[since - 1] <= gaps[since] / STEADY)
        if now.get(AGE, math.inf) <= FRESH and at_once:
            return GapCause(MismatchCause.PRECISION, f"{shape}; it came at once, and samples are of the newest weights")
        return None


def middle(values: Sequence[float]) -> float:
    """Return the median of ``values``; of an even number of values the upper one of the middle two."""
    return sorted(values)[len(values) // 2]


def rank_correlation(values: Sequence[float]) -> float:
    """Return Spearman's correlation of at least two values with their index, in [-1, 1]; ties rank by index.

    >>> rank_correlation([1.0, 2.0, 5.0]), rank_correlation([3.0, 2.0, 1.0])
    (1.0, -1.0)
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    off = sum((rank - place) ** 2 for rank, place in enumerate(order))
    return 1 - 6 * off / (len(values) * (len(values) ** 2 - 1))


def _stale(text: str) -> GapCause:
    return GapCause(MismatchCause.STALE, text)


def template(now: Mapping[str, float]) -> GapCause | None:
    """Detect another template or tokenizer: the gap sits at control tokens, after them and where responses begin."""
    ratio, share = now.get(TEMPLATE_RATIO), now.get(TEMPLATE_SHARE)
    if ratio is None or share is None or ratio < AT_TEMPLATES or share < THERE:
        return None
    text = (
        f"{share:.0%} of the gap lies at control tokens, after them and at the first token of responses, where it is "
        f"{number(ratio, 3)} times that of other tokens, at equal probability"
    )
    return GapCause(MismatchCause.TEMPLATE, text)


def router(now: Mapping[str, float]) -> GapCause | None:
    """Detect a router that chooses other experts: the gap follows the tokens that it sent elsewhere."""
    ratio, moved = now.get(ROUTED), now.get(MOVED)
    if ratio is None or moved is None or ratio < AFTER_MOVED or not 0.0 < moved < 1.0:
        return None
    share = moved * ratio / (moved * ratio + 1.0 - moved)
    if share < OF_MOVED:
        return None
    text = (
        f"{share:.0%} of the gap lies after the {moved:.0%} of tokens that went to other experts, where it is "
        f"{number(ratio, 3)} times that of the others, at equal probability"
    )
    return GapCause(MismatchCause.ROUTER, text)


def truncated(now: Mapping[str, float]) -> GapCause | None:
    """Detect truncated sampling from a row's medians: the gap is one-sided and the mean importance weight is below 1.

    Tokens that are cut off are never sampled. ``now``: canonical metric -> median of the newest rows. None: not
    detected.
    """
    above, weight = now.get(ABOVE), now.get(WEIGHT)
    if above is None or weight is None or above > ONE_SIDED or 1 - weight < KEPT * -math.expm1(-now[GAP]):
        return None
    text = f"{above:.1%} of the gap lies above 0, and the mean weight is {number(weight, 3)}, the mass that is kept"
    return GapCause(MismatchCause.TRUNCATED, text)


def temperature(now: Mapping[str, float]) -> GapCause | None:
    """Detect another sampling temperature from a row's medians: one number explains most of the gap.

    Without a measured entropy only whether the engine is flatter or sharper can be seen. ``now``: canonical metric ->
    median of the newest rows. None: not detected.
    """
    share, value = now.get(EXPLAINED), now.get(TEMPERATURE)
    if share is not None and value is not None and value > 0:
        if share < ONE_TEMPERATURE or abs(math.log(value)) < ANOTHER:
            return None
        text = f"a temperature of {number(value, 3)} times the trainer's explains {share:.0%} of the squared gap"
        return GapCause(MismatchCause.TEMPERATURE, text)
    aligned, slope = now.get(ALIGNED), now.get(SLOPE, 0.0)
    if aligned is None or abs(aligned) < LIKE_TEMPERATURE:
        return None
    how = "flatter" if slope > 0 else "sharper"
    text = (
        f"the engine is the {how} one: d goes with the log-prob (correlation {aligned:.2f}, slope {number(slope, 3)})"
    )
    return GapCause(MismatchCause.TEMPERATURE, text)


SHAPES = (template, truncated, temperature, router)
"""Rules that see their cause in the shape of the gap alone, whatever else adds to it."""

# The one cause for a failure, from those around its onset.

AROUND, ROWS_AROUND = 60, 12
"""Steps and rows after the onset of a mismatch in which its cause is looked for: a lost policy shows other shapes."""


def cause_of(turns: Iterable[KnobChange], onset: int, slack: int, row_steps: int = 1) -> KnobChange | None:
    """Return the longest-lasting cause of a mismatch around the step ``onset``, preferably a named one; None without
    any.

    Parameters
    ----------
    turns
        Changes during the run; only those measured from the gap are used.
    onset
        Step at which the mismatch began.
    slack
        Error of this step, in steps.
    row_steps
        Number of steps between two rows of the log.
    """
    low, high = onset - slack, onset + max(AROUND, ROWS_AROUND * row_steps)
    found: dict[tuple[bool, str], tuple[int, KnobChange]] = {}
    for turn in turns:
        until = turn.step if turn.until is None else turn.until
        stood = min(until, high) - max(turn.step, low)
        if turn.source is ChangeSource.MEASURED and stood >= 0:
            key = (turn.name != MismatchCause.UNCLEAR.value, turn.name)
            before, first = found.get(key, (0, turn))
            found[key] = (before + stood, first)
    if not found:
        return None
    return max(found.items(), key=lambda item: (item[0][0], item[1][0], -item[1][1].step))[1][1]


def standing_cause(turns: Iterable[KnobChange]) -> KnobChange | None:
    """Return the newest segment of the named cause that the gap showed over most steps; None without any.

    ``turns``: changes during the run; only those measured from the gap are used.
    """
    lasted: dict[str, int] = {}
    newest: dict[str, KnobChange] = {}
    for turn in turns:
        if turn.source is ChangeSource.MEASURED and turn.name != MismatchCause.UNCLEAR:
            lasted[turn.name] = lasted.get(turn.name, 0) + (turn.until or turn.step) - turn.step + 1
            newest[turn.name] = turn
    return newest[max(lasted, key=lambda name: lasted[name])] if lasted else None


def wanted(measured: Collection[str] | None) -> str:
    """Return a text on what must be logged to name the cause of a mismatch, in addition to the metrics ``measured``.

    ``measured`` None: it is not known what is logged.
    """
    if measured is None or ABOVE not in measured:
        return 'log-probs of single tokens from trainer and engine (`level="full"`)'
    if DIFFER in measured and AGE in measured:
        return "settings of the engine (dtype, kernels, cache, sampling) in the run's config"
    if DIFFER in measured:
        return "how old each sample is when it is trained on (`staleness/mean`)"
    if AGE not in measured and SYNC not in measured:
        return "`staleness/mean`, or `engine/weight_sync` at the steps of a weight sync"
    return "a digest of the engine's weights at each sync"
