"""How far a run is from each limit of ``labels-v1``, and when a straight line would get there.

One signal is enough here: this is what covers the failures of a single metric, and what no model has to have seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlwatch.forecast.history import Floats, History
from rlwatch.forecast.signals import SIGNALS, Scale

FAR_AHEAD = 200.0
"""Steps beyond which a straight line says nothing."""
CLEAR = 4.0
"""Spreads (:attr:`Standing.noise`) that a signal must have moved before its way to a limit means anything."""
RISEN = 2.0
"""The same of the reward, whose level is a median of rows: 3.4 standard errors of the difference to its baseline."""
SPENT = "ent_low"
"""The type of limit that is no danger while it buys reward: R = -a exp(H) + b (arXiv 2505.22617)."""
LIFTED = "grad"
"""The signal whose level at the start says little of a run that had next to nothing to learn from then."""
TAKING_OFF = 1.0
"""Spreads of the rewards that a run gains in 25 steps as it takes off; one that goes on learning gains a tenth."""
_PLACE = {signal.name: i for i, signal in enumerate(SIGNALS)}


@dataclass(frozen=True, slots=True)
class Limit:
    """A signal's change, in its own scale, at which a failure of that type begins.

    ``change``: against the baseline (negative: downwards). ``level``: value that must be reached as well, where the
    limit has an absolute part (then the farther of the two counts). ``from_best``: against the best level so far.
    """

    type: str
    signal: str
    change: float
    level: float | None = None
    from_best: bool = False


LIMITS_V1: tuple[Limit, ...] = (
    Limit("ent_low", "entropy", math.log(0.2)),
    Limit("ent_high", "entropy", math.log(1.5)),
    Limit("mismatch", "mismatch", math.log(5.0), 0.1),
    Limit("ref_kl", "kl_ref", 0.0, 1.5),
    Limit("length", "cut_off", 0.4),
    Limit("length", "repetition", 0.35),
    Limit("grad", "grad", math.log(6.0)),
    Limit("reward", "reward", -0.5, from_best=True),  # and 40 % of the best so far, and what noise does to a best
)
"""Relative where the label is; a reward has no unit, so half a spread of the rewards is the least its limit can be."""
BROKEN_ROWS, BROKEN_STEPS = 5, 25
"""Rows with something that is not finite, among those of the last steps, at which a run counts as broken: the fifth
skipped update in a row is a failure (labels-v1), and a loop of skips has gaps before it closes."""
LOST = 0.4
"""Share of the best level that a failure loses (labels-v1)."""
OF_A_BEST = 6.0
"""Spreads by which the best of many rows lies above what follows, though nothing has happened."""
LIMIT_FEATURES = tuple(
    f"limit:{limit.type}:{limit.signal}:{kind}" for limit in LIMITS_V1 for kind in ("share", "steps")
)


@dataclass(frozen=True, slots=True)
class Reach:
    """``share`` of the way to a limit (1: reached; NaN: not measured); ``steps`` a straight line needs for the rest.

    ``clear``: the signal has moved by more than noise, and the move means danger: entropy that falls while the reward
    clearly rises is what learning costs.
    """

    limit: Limit
    share: float
    steps: float
    clear: bool = False


def goals(history: History) -> tuple[float, ...]:
    """The change at which each limit is reached, once the baseline is known."""
    return tuple(_goal(limit, history, _PLACE[limit.signal]) for limit in LIMITS_V1)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where all signals stand, each of shape (signals,).

    ``start``: the baseline in the unit of the changes; ``now``: the change against it; ``fallen``: against the best
    level so far; ``slope``: per 10 steps; ``noise``: spread of the baseline or of the last rows,
    whichever is larger: small batches make both large.
    """

    start: Floats
    now: Floats
    fallen: Floats
    slope: Floats
    noise: Floats


class TakeOff:
    """How large gradients became while the reward took off: few groups taught anything before, most do since.

    What comes after is held against that (labels-v3 hold it against the level while the accuracy doubled).
    """

    def __init__(self) -> None:
        self._lift = 0.0

    def update(self, at: Standing) -> float:
        """The change of the gradient, against the baseline, from which its way to a limit begins; at least 0."""
        reward, grad = _PLACE["reward"], _PLACE[LIFTED]
        gained = 2.5 * float(at.slope[reward])
        if gained >= max(TAKING_OFF, RISEN * float(at.noise[reward])) and math.isfinite(at.now[grad]):
            self._lift = max(self._lift, float(at.now[grad]))
        return self._lift


def reaches(goal: tuple[float, ...], at: Standing, lift: float = 0.0) -> tuple[Reach, ...]:
    """Where each limit stands. ``goal``: of each limit, as :func:`goals` gives them; ``lift``: of :class:`TakeOff`."""
    rising = _rising(at)
    return tuple(
        _reach(limit, end, at, lift if limit.signal == LIFTED else 0.0, meant=not (rising and limit.type == SPENT))
        for limit, end in zip(LIMITS_V1, goal, strict=True)
    )


def _rising(at: Standing) -> bool:
    """Whether the reward has clearly risen since the baseline, and not clearly fallen from its best."""
    i = _PLACE["reward"]
    noise = float(at.noise[i])
    return bool(at.now[i] >= RISEN * noise and at.fallen[i] > -CLEAR * noise)


def breaking(history: History) -> Reach:
    """How near a run is to being broken for good: one bad batch that was skipped is not, several within 25 steps are.

    A log of every 5 or 10 steps is judged by its last five rows.
    """
    rows = max(int((history.steps > history.steps[-1] - BROKEN_STEPS).sum()), BROKEN_ROWS)
    count = float(history.broken[-rows:].sum())
    share = count / BROKEN_ROWS
    return Reach(Limit("nan", history.blamed, BROKEN_ROWS), share, 0.0 if share >= 1.0 else FAR_AHEAD, count >= 2)


def nearest(reached: tuple[Reach, ...]) -> Reach | None:
    """The limit that is closest, of those a signal has clearly moved towards; None where there is none."""
    moving = [reach for reach in reached if reach.clear and reach.share > 0.0]
    return max(moving, key=lambda reach: reach.share, default=None)


def _reach(limit: Limit, goal: float, at: Standing, lift: float, *, meant: bool) -> Reach:
    """``lift``: where the way to the limit begins; ``meant``: whether a clear move towards it means danger."""
    i = _PLACE[limit.signal]
    moved = float((at.fallen if limit.from_best else at.now)[i]) - lift
    if not math.isfinite(moved):
        return Reach(limit, math.nan, math.nan)
    if limit.from_best:
        best = float(at.start[i] + at.now[i] - at.fallen[i])
        goal = -max(-goal, LOST * abs(best), OF_A_BEST * float(at.noise[i]))
    share = moved / goal if goal else math.nan
    pace = float(at.slope[i]) / 10.0
    steps = (goal - moved) / pace if math.isfinite(pace) and pace * goal > 0.0 else FAR_AHEAD
    ahead = 0.0 if share >= 1.0 else min(max(steps, 0.0), FAR_AHEAD)
    return Reach(limit, share, ahead, meant and abs(moved) >= CLEAR * float(at.noise[i]))


def _goal(limit: Limit, history: History, i: int) -> float:
    """The change at which the limit is reached."""
    base = history.baseline
    if base is None or SIGNALS[i].scale is not Scale.RATIO:
        return limit.change
    row = np.full((2, len(SIGNALS)), math.nan)
    row[:, i] = base[i] * math.exp(limit.change), -math.inf if limit.level is None else limit.level
    relative, absolute = history.changes(row)[:, i]
    return float(relative if limit.level is None else max(relative, absolute))
