"""A small model written by hand, for tests of what reads one."""

from rlwatch.forecast.model import LEAF, Head, LinearScore, Model, Profile, Tree

FEATURES = ("entropy:fallen", "mismatch:slope25")
STUMP = Tree((0, LEAF, LEAF), (-8.0, 0.0, 0.0), (0, 0, 0), (1, 0, 0), (2, 0, 0), (0.2, 3.0, -1.0))
"""Entropy that fell by eight spreads speaks for a failure."""
DEEP = Tree(
    (1, 0, LEAF, LEAF, LEAF),
    (2.0, 0.0, 0.0, 0.0, 0.0),
    (1, 0, 0, 0, 0),
    (1, 2, 0, 0, 0),
    (4, 3, 0, 0, 0),
    (0.0, -0.4, 0.1, -0.5, 1.5),
)
"""A growing mismatch speaks for one; else entropy decides."""


LINE = LinearScore((1, 0), (2.0, 4.0), (0.3, -0.2))
"""A growing mismatch and a falling entropy speak for one, all the way."""


def small_model(**changes):
    head = Head(-2.0, (STUMP, DEEP), 0.9, 0.1, LINE)
    ends = frozenset({"entropy", "mismatch"})
    parts = {
        "features": FEATURES,
        "hazards": (head, Head(-1.5, (STUMP,)), Head(-1.0, (DEEP,))),
        "limits": {"ent_low": Head(0.0, (STUMP,)), "mismatch": Head(0.0, (DEEP,))},
        "gains": {"entropy": 0.8, "mismatch": 0.2},
        "profiles": (
            Profile("both", ends, {"1": 0.6, "0.5": 0.8}, {"1": 0.9, "0.5": 0.95}),
            Profile("entropy alone", frozenset({"entropy"}), {"1": 0.7, "0.5": 0.9}, {"1": 0.9, "0.5": 0.95}),
        ),
        "meta": {"made": "by hand"},
    }
    return Model(**(parts | changes))
