"""Which tokens are to blame again and again (pure)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlwatch.records import SpikeBatch

from . import format as fmt
from . import table
from .token_rows import Token, tokens

COLUMNS = (
    table.Column("token", "long"),
    table.Column("times", "right tight"),
    table.Column("steps", "right tight"),
    table.Column("causes", "long"),
    table.Column("first step", "right tight"),
    table.Column("last step", "right tight"),
    table.Column("largest share", "right tight"),
)
MOST = 20
"""Tokens listed."""


@dataclass(slots=True)
class Recurring:
    """One entry of the vocabulary that was a culprit: how often, where, why. ``token``: the newest of them."""

    token: Token
    times: int = 0
    steps: set[int] = field(default_factory=set)
    causes: Counter[str] = field(default_factory=Counter)
    share: float | None = None

    def add(self, token: Token, step: int) -> None:
        """One more time."""
        self.token, self.times = token, self.times + 1
        self.steps.add(step)
        self.causes[token.words.get("cause", "unexplained")] += 1
        share = token.numbers.get("share", math.nan)
        if math.isfinite(share):
            self.share = share if self.share is None else max(self.share, share)


def recurring(batches: Iterable[SpikeBatch]) -> list[Recurring]:
    """Tokens that were culprits more than once, the most frequent first. ``batches`` of culprits, oldest first."""
    found: dict[object, Recurring] = {}
    for batch in batches:
        for token in tokens(batch):
            key = token.text if token.token_id is None else token.token_id
            if key is not None:
                found.setdefault(key, Recurring(token)).add(token, batch.step)
    again = [one for one in found.values() if one.times > 1]
    return sorted(again, key=lambda one: (-one.times, -(one.share or 0.0), one.token.label))


def row(one: Recurring) -> table.Row:
    """It as a row of :data:`COLUMNS`."""
    token = one.token
    known = token.token_id is not None and token.text is not None
    causes = " · ".join(f"{fmt.shorten(cause, 40)} {count}" for cause, count in one.causes.most_common())
    return table.Row(
        [
            table.text(token.label, f"id {token.token_id}" if known else ""),
            table.text(fmt.step(one.times)),
            table.text(fmt.step(len(one.steps))),
            table.text(causes),
            table.text(fmt.step(min(one.steps))),
            table.text(fmt.step(max(one.steps))),
            table.text(fmt.percent(one.share)),
        ]
    )


def scope(batches: Sequence[SpikeBatch], most: int) -> str:
    """Over how many steps this looked."""
    steps = {(batch.attempt, batch.step) for batch in batches}
    older = ", the newest" if len(batches) >= most else ""
    return f"over {fmt.plural(len(steps), 'localised step')}{older}"
