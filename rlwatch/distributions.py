"""Distributions of a quantity over the tokens of a step: counts in bins that are the same for every step and rank.

A bin is what float32 numbers have in common that share sign, exponent and the first bits of the mantissa: a half or a
quarter of an octave. So bins need no settings, two counts add up to the count of both, and a quantile is known to
within the bin it is in. Small values share one bin around 0; NaN and infinities are counted apart.
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
"""Exponent, as it is stored, of what is not finite."""


@dataclass(frozen=True, slots=True)
class TokenQuantity:
    """A quantity of tokens. ``bits`` of the mantissa separate bins: 1 for halves, 2 for quarters of an octave.

    Values smaller than ``least`` (a power of 2) either way share a bin. ``log``: what is counted is the logarithm.
    ``code`` identifies all of this in a record: other bins need another.
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
"""What is counted of tokens, by name: log pi / pi_old; log-probs of trainer and rollout engine; entropy."""


def bins_of(bits: int) -> int:
    """Number of bins of all float32 numbers."""
    return 1 << (1 + 8 + bits)


def bin_ends(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of every bin, in order of sign, exponent and mantissa as they are stored.

    Of what is not finite both ends are the value: -inf, inf or NaN.
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
    """Lower and upper end of every bin of finite values as they are recorded, ascending; each ends where one begins."""
    import numpy as np

    low, high = _ends(quantity)
    kept = np.unique(_folding(quantity))
    kept = kept[np.isfinite(low[kept])]
    order = kept[np.argsort(low[kept])]
    return low[order], high[order]


def _ends(quantity: TokenQuantity) -> tuple[np.ndarray, np.ndarray]:
    """:func:`bin_ends`, but that the first bin is that of all small values."""
    low, high = bin_ends(quantity.bits)
    low[0], high[0] = -quantity.least, quantity.least
    return low, high


def _folding(quantity: TokenQuantity) -> np.ndarray:
    """Of every bin the one that it is recorded in: small values in the first, all NaNs in one."""
    import numpy as np

    low, high = bin_ends(quantity.bits)
    places = np.arange(len(low))
    broken = np.isnan(low)
    small = (low >= -quantity.least) & (high <= quantity.least)
    folded: np.ndarray = np.where(small, 0, np.where(broken, broken.argmax(), places))
    return folded


@dataclass(frozen=True, slots=True)
class Distributions:
    """One ``quantity`` over the tokens of each of S records, by step and attempt.

    ``counts`` (S, R) tokens between ``low`` and ``high`` (R,), which ascend; ``broken`` (S, 3) counts NaN, -Inf and
    +Inf, which are in no bin.
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
        """Number of tokens with a finite value (S,)."""
        total: np.ndarray = self.counts.sum(axis=1)
        return total

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens (S,)."""
        total: np.ndarray = self.finite + self.broken.sum(axis=1)
        return total

    def where(self, mask: np.ndarray) -> Distributions:
        """Those of some of the records."""
        kept = (of[mask] for of in (self.steps, self.attempts, self.counts, self.broken))
        steps, attempts, counts, broken = kept
        return Distributions(self.quantity, steps, attempts, self.low, self.high, counts, broken)

    def quantiles(self, shares: Sequence[float]) -> np.ndarray:
        """Quantiles (S, Q) of the finite values: each lies in the bin that the exact one is in. NaN of none."""
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
    """Counts of every bin (quantity -> :func:`bins_of` counts) as one record; None where nothing was counted."""
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
    """Records of :func:`batch_of` by quantity; what makes no sense is left out."""
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
    """One quantity of all records. ``of`` (N, 2): step and attempt of each; ``columns``: which of them a row is of,
    the bin, and how often.
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
    """Decides which distributions are kept: all of the first :attr:`WHOLE` steps, then one in ever more.

    Of n steps about WHOLE (1 + ln(n / WHOLE)) are kept, so that a run of any length stays small and its newest steps
    lie no further apart than a thousandth of it.
    """

    WHOLE = 1000

    def __init__(self) -> None:
        self._seen, self._kept_at = 0, 0

    def due(self) -> bool:
        """True where the distributions of one more step are to be kept."""
        self._seen += 1
        if self._seen - self._kept_at < -(-self._seen // self.WHOLE):
            return False
        self._kept_at = self._seen
        return True
