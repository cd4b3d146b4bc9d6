"""Histograms of a quantity over all tokens of a step, with bins that are the same for every step and rank.

A bin holds the float32 numbers with the same sign, exponent and first one or two bits of the mantissa: a half or a
quarter of an octave. So bins need no settings, the counts of two ranks can be added, and a quantile is known to within
its bin. Small values share one bin around 0. NaN and infinities are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlwatch.records import DISTRIBUTIONS, SpikeBatch

if TYPE_CHECKING:
    import numpy as np

MANTISSA = 23
"""Bits of a float32 number's mantissa."""
ENDLESS = 255
"""Stored exponent of the float32 numbers that are infinite or NaN."""


@dataclass(frozen=True, slots=True)
class TokenQuantity:
    """One quantity that is measured for every token, such as the entropy, and the bins of its histogram.

    Parameters
    ----------
    code
        Number that identifies the quantity and its bins in a record; different bins need a new code.
    name, title, unit
        Name in code, name for people, and unit (empty for a ratio).
    bits
        Bits of the mantissa that separate bins: 1 for halves of an octave, 2 for quarters.
    least
        Values between ``-least`` and ``least`` share one bin; a power of 2.
    log
        Whether the counted value is the logarithm of the quantity.
    """

    code: int
    name: str
    title: str
    unit: str
    bits: int
    least: float
    log: bool = False


QUANTITIES = {
    one.name: one
    for one in (
        TokenQuantity(0, "log_ratio", "importance ratio", "", 1, 2.0**-12, log=True),
        TokenQuantity(1, "logp_difference", "log-prob difference, trainer − engine", "nats", 1, 2.0**-12),
        TokenQuantity(2, "entropy", "entropy", "nats", 2, 2.0**-9),
    )
}
"""Quantities of tokens whose histograms are recorded, by name: log pi / pi_old; the difference of log-probs between
trainer and rollout engine; entropy.
"""


def bins_of(bits: int) -> int:
    """Return the number of bins into which all float32 numbers fall if ``bits`` bits of the mantissa separate bins."""
    return 1 << (1 + 8 + bits)


def bin_ends(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper end of every bin as two float64 arrays of :func:`bins_of` values.

    The bins are in the order of sign, exponent and mantissa as float32 stores them: positive ones first, outwards from
    0, then negative ones likewise. For a bin of infinities or NaN both ends are -inf, inf or NaN.
    """
    import numpy as np

    half = bins_of(bits) // 2
    keys = np.arange(half + 1, dtype=np.int64) << (MANTISSA - bits)
    with np.errstate(all="ignore"):
        starts = keys.astype(np.uint32).view(np.float32).astype(np.float64)
    near, far = starts[:-1].copy(), starts[1:].copy()
    endless = np.arange(half) >> bits == ENDLESS
    near[endless], far[endless] = np.nan, np.nan
    first = int(np.argmax(endless))
    near[first] = far[first] = np.inf
    far[first - 1] = np.finfo(np.float32).max
    return np.concatenate([near, -far]), np.concatenate([far, -near])


def kept_bins(quantity: TokenQuantity) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper end of every recorded bin of finite values, ascending: two arrays of equal length.

    Each bin begins where the one before it ends. Small values are in one bin around 0.
    """
    import numpy as np

    low, high = _ends(quantity)
    kept = np.unique(_folding(quantity))
    kept = kept[np.isfinite(low[kept])]
    order = kept[np.argsort(low[kept])]
    return low[order], high[order]


def _ends(quantity: TokenQuantity) -> tuple[np.ndarray, np.ndarray]:
    """Return :func:`bin_ends` with the first bin widened to -least .. least, for all small values."""
    low, high = bin_ends(quantity.bits)
    low[0], high[0] = -quantity.least, quantity.least
    return low, high


def _folding(quantity: TokenQuantity) -> np.ndarray:
    """Return for every bin the number of the bin in which it is recorded: the first one for small values, one for all
    NaNs.
    """
    import numpy as np

    low, high = bin_ends(quantity.bits)
    places = np.arange(len(low))
    broken = np.isnan(low)
    small = (low >= -quantity.least) & (high <= quantity.least)
    folded: np.ndarray = np.where(small, 0, np.where(broken, broken.argmax(), places))
    return folded


@dataclass(frozen=True, slots=True)
class Distributions:
    """Histograms of one ``quantity`` over the tokens of each of S recorded steps.

    Parameters
    ----------
    quantity
        Name in :data:`QUANTITIES`.
    steps, attempts
        (S,) optimizer step, and process of the run (1, 2, ...; a resume is a new one), of each record.
    low, high
        (R,) lower and upper ends of the bins, ascending.
    counts
        (S, R) number of tokens in each bin.
    broken
        (S, 3) number of tokens whose value is NaN, -Inf and +Inf; they are in no bin.
    """

    quantity: str
    steps: np.ndarray
    attempts: np.ndarray
    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray
    broken: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """Number of tokens with a finite value in each recorded step, an integer array (S,)."""
        total: np.ndarray = self.counts.sum(axis=1)
        return total

    @property
    def tokens(self) -> np.ndarray:
        """Number of all tokens in each recorded step, also those with NaN or infinities, an integer array (S,)."""
        total: np.ndarray = self.finite + self.broken.sum(axis=1)
        return total

    def where(self, mask: np.ndarray) -> Distributions:
        """Return the histograms of only those recorded steps for which the boolean ``mask`` (S,) is True."""
        kept = (of[mask] for of in (self.steps, self.attempts, self.counts, self.broken))
        steps, attempts, counts, broken = kept
        return Distributions(self.quantity, steps, attempts, self.low, self.high, counts, broken)

    def quantiles(self, shares: Sequence[float]) -> np.ndarray:
        """Return the quantiles ``shares`` (Q numbers in [0, 1]) of the finite values of each step, a float array (S,
        Q).

        A quantile is interpolated in the bin that contains the exact one. It is NaN for a step without finite values.
        """
        import numpy as np

        found = np.full((len(self.steps), len(shares)), np.nan)
        if not len(self.low):
            return found
        ends, rows = self.counts.cumsum(axis=1), np.arange(len(self.steps))
        some = ends[:, -1] > 0
        for column, share in enumerate(shares):
            places = share * (ends[:, -1] - 1).clip(min=0)
            at = (ends > np.floor(places)[:, None]).argmax(axis=1)
            own = self.counts[rows, at].clip(min=1)
            inside = ((places - ends[rows, at] + own + 0.5) / own).clip(0, 1)
            value = self.low[at] + inside * (self.high[at] - self.low[at])
            found[some, column] = value[some]
        return found


def batch_of(step: int, counted: Mapping[str, np.ndarray]) -> SpikeBatch | None:
    """Return the histograms of one step as one record for the store; None if no token was counted.

    Parameters
    ----------
    step
        The optimizer step.
    counted
        Quantity -> integer array of :func:`bins_of` counts, one for each bin in the order of :func:`bin_ends`.
    """
    import numpy as np

    columns: tuple[list[np.ndarray], ...] = ([], [], [])
    for name, counts in counted.items():
        quantity = QUANTITIES[name]
        folded = np.zeros(bins_of(quantity.bits), dtype=np.int64)
        np.add.at(folded, _folding(quantity), np.asarray(counts, dtype=np.int64))
        used = np.flatnonzero(folded)
        for column, values in zip(columns, (np.full(len(used), quantity.code), used, folded[used]), strict=True):
            column.append(values)
    if not sum(map(len, columns[0])):
        return None
    codes, bins, counts = map(np.concatenate, columns)
    return SpikeBatch(
        step, {"quantity": codes.astype(np.int8), "bin": bins.astype(np.int16), "count": counts}, DISTRIBUTIONS
    )


def distributions(batches: Iterable[SpikeBatch]) -> dict[str, Distributions]:
    """Return the histograms in records that :func:`batch_of` made, by name of the quantity; invalid records are
    skipped.
    """
    import numpy as np

    read = [found for batch in batches if (found := _columns_of(batch)) is not None]
    if not read:
        return {}
    codes, bins, counts = (np.concatenate([columns[place] for columns, _ in read]) for place in range(3))
    where = np.repeat(np.arange(len(read)), [len(columns[0]) for columns, _ in read])
    of = np.array([(batch.step, batch.attempt) for _, batch in read], dtype=np.int64)
    known = {}
    for name, quantity in QUANTITIES.items():
        own = (codes == quantity.code) & (counts > 0) & (bins >= 0) & (bins < bins_of(quantity.bits))
        if own.any():
            known[name] = _gathered(quantity, of, where[own], bins[own], counts[own])
    return known


def _columns_of(batch: SpikeBatch) -> tuple[tuple[np.ndarray, ...], SpikeBatch] | None:
    import numpy as np

    if batch.reason != DISTRIBUTIONS:
        return None
    try:
        return tuple(np.asarray(batch.columns[name], dtype=np.int64) for name in ("quantity", "bin", "count")), batch
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _gathered(quantity: TokenQuantity, of: np.ndarray, *columns: np.ndarray) -> Distributions:
    """Return the histograms of one quantity in all records.

    ``of`` (N, 2): step and attempt of each record. ``columns``: three arrays of equal length, with the index of the
    record, the bin and the count.
    """
    import numpy as np

    where, bins, counts = columns
    there = np.flatnonzero(np.bincount(where, minlength=len(of)))
    there = there[np.lexsort((of[there, 1], of[there, 0]))]
    row = np.empty(len(of), dtype=np.int64)
    row[there] = np.arange(len(there))
    used = np.flatnonzero(np.bincount(bins))
    table = np.zeros((len(there), len(used)), dtype=np.int64)
    np.add.at(table, (row[where], np.searchsorted(used, bins)), counts)
    low, high = (ends[used] for ends in _ends(quantity))
    finite = np.flatnonzero(np.isfinite(low))
    order = finite[np.argsort(low[finite])]
    broken = np.stack([table[:, odd].sum(axis=1) for odd in (np.isnan(low), low == -np.inf, low == np.inf)], axis=1)
    steps, attempts = of[there].T
    return Distributions(quantity.name, steps, attempts, low[order], high[order], table[:, order], broken)


class Sparing:
    """Choice of the steps whose histograms are stored: all of the first :attr:`WHOLE` steps, then an ever smaller
    share.

    Of n steps about WHOLE (1 + ln(n / WHOLE)) are stored, so that a run of any length stays small and its newest steps
    lie no further apart than a thousandth of its length.
    """

    WHOLE = 1000

    def __init__(self) -> None:
        self._seen, self._kept_at = 0, 0

    def due(self) -> bool:
        """Count one more step; return True if its histograms are to be stored."""
        self._seen += 1
        if self._seen - self._kept_at < -(-self._seen // self.WHOLE):
            return False
        self._kept_at = self._seen
        return True
