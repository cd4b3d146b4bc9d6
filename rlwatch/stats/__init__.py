"""Streaming statistics: plain floats in, bounded memory, no torch.

Everything that remembers has ``update``, ``get`` and ``state_dict``. Policy on non-finite input, the same
everywhere: NaN, +Inf and -Inf are skipped and counted (``skipped``), they never enter a statistic.
"""

from __future__ import annotations

from rlwatch.stats.baseline import Baseline
from rlwatch.stats.cusum import Cusum
from rlwatch.stats.hold import Hold
from rlwatch.stats.line import Line, fit_line
from rlwatch.stats.robust import mad, median, quantile
from rlwatch.stats.slope import slope_interval, theil_sen
from rlwatch.stats.thinned import Thinned
from rlwatch.stats.window import Window

__all__ = [
    "Baseline",
    "Cusum",
    "Hold",
    "Line",
    "Thinned",
    "Window",
    "fit_line",
    "mad",
    "median",
    "quantile",
    "slope_interval",
    "theil_sen",
]
