"""How much of the training time localisation may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlwatch.clock import Clock, SystemClock
from rlwatch.stats.state import Stateful


class Budget(Stateful):
    """Keeps the time spent on localisation below a share of the time spent on training.

    ``spent <= share * (elapsed - spent) + allowance`` holds at any time if no localisation takes longer than was
    estimated; what one takes beyond its estimate is a debt that later ones wait for. The clock is this process's own:
    where several ranks localise together, one decides and tells the others.

    Parameters
    ----------
    share
        Of the training time, in [0, 1); 0.01 is 1 %.
    allowance_s
        Seconds that may be spent before any training time has passed. The first localisation, and the first of a
        non-finite gradient, are granted beyond it if need be: the allowance grows by what they lack.
    clock
        Tells how long training has gone on; only its intervals count.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ("allowance_s", "spent_s", "granted", "refused", "traced")

    def __init__(self, *, share: float = 0.01, allowance_s: float = 30.0, clock: Clock | None = None) -> None:
        if not 0.0 <= share < 1.0:
            raise ValueError(f"share is a part of the training time within [0, 1), got {share:g}")
        self.share = share
        self.allowance_s = allowance_s
        self.spent_s = 0.0
        self.granted = 0
        self.refused = 0
        self.traced = False
        self._clock = clock or SystemClock()
        self._start = self._clock.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since training began, time spent on localisation among them."""
        return self._clock.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds that may be spent now; negative while there is a debt."""
        return self.share * max(0.0, self.elapsed_s - self.spent_s) + self.allowance_s - self.spent_s

    def may(self, estimate_s: float, *, non_finite: bool = False) -> bool:
        """Whether a localisation that takes about ``estimate_s`` seconds may be done now; refusals are counted."""
        due = self.granted == 0 or (non_finite and not self.traced)
        lacking = estimate_s - self.left_s
        if lacking > 0.0 and not due:
            self.refused += 1
            return False
        self.allowance_s += max(0.0, lacking)
        self.granted += 1
        self.traced = self.traced or non_finite
        return True

    def spent(self, seconds: float) -> None:
        """Book what a localisation really took, once it is over."""
        self.spent_s += max(0.0, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; time goes on from here when they are loaded."""
        return {**super().state_dict(), "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Raises ``KeyError`` if a part is missing."""
        super().load_state_dict(state)
        self._start = self._clock.monotonic() - state["elapsed_s"]
