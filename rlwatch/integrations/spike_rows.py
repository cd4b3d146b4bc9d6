"""Rows of extreme tokens, as they come from a device, read as a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlwatch.records import FAR_OUT, NON_FINITE, SpikeBatch

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text."""

_WHOLE = ("sequence", "position", "token_id")


def spike_batch(
    step: int, rows: np.ndarray, names: Sequence[str], texts: Sequence[str] = (), *, rank: int = 0
) -> SpikeBatch | None:
    """The tokens at or beyond a limit, worst first; None in an ordinary step.

    ``rows`` (K, 1 + C) hold the score and the columns ``names``, as in :class:`rlwatch.tensors.spikes.SpikeTable`;
    ``texts`` are those of the rows, if they are to be kept.
    """
    far = np.flatnonzero(rows[:, 0] >= 1)
    if not len(far):
        return None
    worst = far[np.argsort(-rows[far, 0], kind="stable")]
    chosen = rows[worst]
    columns: dict[str, np.ndarray | list[str]] = {
        name: chosen[:, i].astype(np.int64) if name in _WHOLE else chosen[:, i] for i, name in enumerate(names, 1)
    }
    if texts:
        columns["text"] = [texts[row] for row in worst]
    reason = NON_FINITE if np.isinf(chosen[0, 0]) else FAR_OUT
    return SpikeBatch(step, columns, reason=reason, rank=rank)


def texts_of(rows: np.ndarray, names: Sequence[str], decode: Decode | None) -> list[str]:
    """The text of each row that is at or beyond a limit, ``""`` of the others; nothing where texts are not kept."""
    if decode is None or "token_id" not in names:
        return []
    ids = rows[:, 1 + list(names).index("token_id")]
    return [decode([int(token)]) if score >= 1 else "" for score, token in zip(rows[:, 0], ids, strict=True)]


def most_extreme(tables: Sequence[np.ndarray], most: int) -> list[np.ndarray]:
    """Of all ``tables`` (K, 1 + C) together the ``most`` rows with the highest scores, each still in its table.

    The others get the score -inf, so that every row keeps its place.
    """
    scores = np.concatenate([table[:, 0] for table in tables])
    beyond = np.argsort(-scores, kind="stable")[most:]
    scores[beyond] = -np.inf
    ends = np.cumsum([len(table) for table in tables])[:-1]
    pieces = np.split(scores, ends)
    return [np.column_stack([score, table[:, 1:]]) for score, table in zip(pieces, tables, strict=True)]
