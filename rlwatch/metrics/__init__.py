"""One table of metrics: rlwatch's (canonical) name, unit, range, meaning, and what each trainer calls the metric.

A record keeps the names its source used. :func:`canonicalise` maps them to canonical names: a canonical name wins over
an alias that is the same quantity, which wins over a proxy. Nothing is ever rescaled. Sources of the names: TRL 1.16,
verl 0.9.1, OpenRLHF 0.11.2, prime-rl, NeMo-RL, slime, AReaL, SkyRL, ROLL, ms-swift and the tinker cookbook, read in
their code.
"""

from __future__ import annotations

from rlwatch.metrics.reading import (
    BY_NAME,
    LAYER_PREFIX,
    UPDATE_PREFIX,
    WEIGHTS_PREFIX,
    Reading,
    family_of,
    meaning_of,
    metric_of,
    resolve,
    unit_of,
)
from rlwatch.metrics.rows import Alias, Family, Metric, Relation
from rlwatch.metrics.table import OPEN, TABLE
from rlwatch.metrics.together import (
    ROLE_NAMES,
    RowReader,
    Taken,
    canonicalise,
    known,
    like_rewards,
    metric_called,
    read_as,
    shadowed,
    taken,
    unread,
)
from rlwatch.metrics.unjudged import NOT_LEARNING, foremost, unjudged

__all__ = [
    "BY_NAME",
    "LAYER_PREFIX",
    "NOT_LEARNING",
    "OPEN",
    "ROLE_NAMES",
    "TABLE",
    "UPDATE_PREFIX",
    "WEIGHTS_PREFIX",
    "Alias",
    "Family",
    "Metric",
    "Reading",
    "Relation",
    "RowReader",
    "Taken",
    "canonicalise",
    "family_of",
    "foremost",
    "known",
    "like_rewards",
    "meaning_of",
    "metric_called",
    "metric_of",
    "read_as",
    "resolve",
    "shadowed",
    "taken",
    "unit_of",
    "unjudged",
    "unread",
]
