"""Sums of decision trees and of weighted features, read without the library that fitted them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LEAF = -1
"""Feature of a node that asks nothing."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in columns of equal length, the root first and every child behind its parent.

    ``feature``: index of what is asked, or :data:`LEAF`; ``threshold``: a value at or below it goes ``left``;
    ``missing_left``: whether NaN does; ``value``: what is added if the walk ends here (in log-odds), or would have
    been.
    """

    feature: Sequence[int]
    threshold: Sequence[float]
    missing_left: Sequence[int]
    left: Sequence[int]
    right: Sequence[int]
    value: Sequence[float]

    def walk(self, x: Sequence[float]) -> list[int]:
        """Nodes from the root to a leaf."""
        node, path = 0, [0]
        while (feature := self.feature[node]) != LEAF:
            asked = x[feature]
            left = self.missing_left[node] if math.isnan(asked) else asked <= self.threshold[node]
            node = self.left[node] if left else self.right[node]
            path.append(node)
        return path

    def asking(self, place: Mapping[int, int]) -> Tree:
        """The same tree over features that lie elsewhere."""
        feature = tuple(LEAF if asked == LEAF else place[asked] for asked in self.feature)
        return Tree(feature, self.threshold, self.missing_left, self.left, self.right, self.value)

    def times(self, factor: float) -> Tree:
        """The same tree with all its values multiplied."""
        values = tuple(factor * value for value in self.value)
        return Tree(self.feature, self.threshold, self.missing_left, self.left, self.right, values)


FAR = 5.0
"""Spreads at which a feature of a weighted sum is cut off: a line has no other way not to be carried away by one."""


@dataclass(frozen=True, slots=True)
class Line:
    """A weighted sum, in columns of equal length: ``weight`` times ``feature`` (an index) over its ``spread``.

    A feature counts for at most :data:`FAR` spreads; one that was not measured has not moved, and adds nothing.
    """

    feature: tuple[int, ...] = ()
    spread: tuple[float, ...] = ()
    weight: tuple[float, ...] = ()
    _columns: tuple[Ints, Floats, Floats] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """The columns as arrays: a line is read at every step."""
        columns = (np.asarray(self.feature, dtype=np.int64), np.asarray(self.spread), np.asarray(self.weight))
        object.__setattr__(self, "_columns", columns)

    def terms(self, x: Sequence[float]) -> Floats:
        """What each feature adds, in the order of the columns."""
        feature, spread, weight = self._columns
        moved = np.nan_to_num(np.asarray(x, dtype=np.float64)[feature] / spread, posinf=FAR, neginf=-FAR)
        return np.asarray(weight * np.minimum(np.maximum(moved, -FAR), FAR))


@dataclass(frozen=True, slots=True)
class Head:
    """Log-odds of one question: ``base``, the trees and the line added up, ``slope`` times that plus ``offset``.

    Slope and offset are the calibration.
    """

    base: float
    trees: tuple[Tree, ...]
    slope: float = 1.0
    offset: float = 0.0
    line: Line = Line()

    def logit(self, x: Sequence[float]) -> float:
        """Calibrated log-odds."""
        total = self.base
        for tree in self.trees:
            total += tree.value[tree.walk(x)[-1]]
        if self.line.feature:
            total += float(self.line.terms(x).sum())
        return self.slope * total + self.offset

    def shares(self, x: Sequence[float]) -> dict[int, float]:
        """What each feature added to the log-odds: along each path, the change of value goes to what was asked.

        Exact: the values sum to the logit less that of a walk that asks nothing (Saabas, 2014).
        """
        added = dict(zip(self.line.feature, (self.slope * self.line.terms(x)).tolist(), strict=True))
        for tree in self.trees:
            path = tree.walk(x)
            for node, after in pairwise(path):
                feature = tree.feature[node]
                change = self.slope * (tree.value[after] - tree.value[node])
                added[feature] = added.get(feature, 0.0) + change
        return added


def probability(logit: float) -> float:
    """Logistic function, for any finite or infinite logit."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(min(logit, 700.0)))
