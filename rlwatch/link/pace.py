"""Where in a run a rank is: the same words for the same moment on every rank."""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    """Ordered as they happen. ``lap`` counts how often steps went back (training began anew), ``again`` how often the
    same step came.
    """

    lap: int
    step: int
    again: int


START = Moment(0, 0, 0)


class Pace:
    """Turns the steps of one rank, in the order they come, into moments.

    >>> pace = Pace()
    >>> [tuple(pace.next(step)) for step in (1, 2, 2, 1)]
    [(0, 1, 0), (0, 2, 0), (0, 2, 1), (1, 1, 0)]
    """

    def __init__(self) -> None:
        self._last: Moment | None = None
        self._lap = 0

    def next(self, step: int) -> Moment:
        """The moment of ``step`` (>= 0), which comes now."""
        last = self._last
        if last is None or last.lap < self._lap or step > last.step:
            moment = Moment(self._lap, step, 0)
        elif step == last.step:
            moment = last._replace(again=last.again + 1)
        else:
            self._lap += 1
            moment = Moment(self._lap, step, 0)
        self._last = moment
        return moment

    @property
    def lap(self) -> int:
        """How often steps went back so far."""
        return self._lap

    def join(self, lap: int) -> None:
        """The others are in ``lap``: a rank that comes late counts on from there."""
        self._lap = max(self._lap, lap)
