"""A localisation in the form in which a store keeps it: outlying tokens (culprits) and their responses in columns, and
one event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlwatch.gradloc.culprits import NUMBERS, HostPass
from rlwatch.gradloc.passes import IDENTITY
from rlwatch.gradloc.report import Culprit, Localisation, NonfiniteTrace, TokenAt
from rlwatch.records import CULPRITS, JSON, RESPONSES, SpikeBatch

CONTEXT = 256
"""Number of tokens on each side of a culprit that are kept of its response."""
MOST_RESPONSES = 8
MOST_LAYERS = 16
MOST_CULPRITS = 5
MOST_PLACED = 32
"""Largest number of culprits whose position in the text is computed, because the response must be decoded up to
them.
"""
MOST_TEXT = 4000
"""Largest number of characters that are kept of a prompt."""
UNKNOWN = -1
"""Placeholder for unknown values in columns of integers."""
WINDOW = 12
"""Number of tokens before and after a culprit whose text is kept with it."""

_TRACED = ("kind", "name", "origin", "layer", "index", "dtype", "count", "chain", "broken", "id0_frac")

Decode = Callable[[Sequence[int]], str]
"""Function that converts token ids to their text."""
Columns = dict[str, "np.ndarray | Sequence[str]"]


def culprit_batches(
    step: int, report: Localisation, hosts: Sequence[HostPass] = (), *, decode: Decode | None = None
) -> list[SpikeBatch]:
    """Return the culprits (outlying tokens) of a report, worst first, as one batch of rows for each rank that has some.

    With ``decode`` the columns ``text``, ``before`` and ``after`` are added: the text of culprits in ``hosts`` (the
    micro-batches of this rank, on the CPU), ``""`` for others.
    """
    ranks = sorted({culprit.at.rank for culprit in report.culprits})
    return [
        SpikeBatch(
            step, _culprits([c for c in report.culprits if c.at.rank == rank], hosts, decode), CULPRITS, rank=rank
        )
        for rank in ranks
    ]


def response_batch(
    step: int,
    report: Localisation,
    hosts: Sequence[HostPass],
    contributions: Sequence[Any] = (),
    *,
    rank: int = 0,
    context: int = CONTEXT,
    most: int = MOST_RESPONSES,
    decode: Decode | None = None,
) -> SpikeBatch | None:
    """Return the tokens of this rank's responses with culprits (outlying tokens), ``context`` tokens around each; None
    if there are none.

    At most ``most`` responses are included, that of the worst culprit first. ``hosts`` are the micro-batches of this
    rank, on the CPU, ``contributions`` (B, T) those of each. With ``decode`` the text of tokens is added.
    """
    pieces: list[Columns] = []
    for (microbatch, row), positions in _stretches(report.culprits, rank, context, most):
        host = hosts[microbatch]
        kept = np.array([t for t in range(host.mask.shape[1]) if host.mask[row, t] and t in positions], dtype=np.int64)
        shares = _contributions(contributions[microbatch][row][kept], report.norm) if contributions else {}
        pieces.append(_response(host, row, kept, decode) | shares)
    if not pieces:
        return None
    names = [name for name in pieces[0] if all(name in piece for piece in pieces)]
    columns: Columns = {name: _joined([piece[name] for piece in pieces]) for name in names}
    return SpikeBatch(step, columns, RESPONSES, rank=rank)


def event_body(report: Localisation) -> dict[str, JSON]:
    """Return a short form of a report for an event of kind ``LOCALISED``: JSON values, with NaN and infinities as
    floats.
    """
    traced = {} if report.trace is None else {"trace": {name: _plain(report.trace, name) for name in _TRACED}}
    return {
        "norm": report.norm,
        "threshold": report.threshold,
        "tokens": report.tokens,
        "method": None if report.method is None else report.method.value,
        "gap": report.gap,
        "complete": report.complete,
        "cause": report.cause.value,
        "message": report.message,
        "why_not": report.why_not,
        "notes": list(report.notes),
        "culprits": [_short(culprit) for culprit in report.culprits[:MOST_CULPRITS]],
        "layers": _largest(report.layers),
        "cost": asdict(report.cost),
        "verdict": report.verdict.value,
        "statement": report.statement,
        "because": report.because,
        "remedy": report.remedy,
        "cures": [asdict(cure) for cure in report.cures],
        "units": [asdict(unit) for unit in report.units],
        "count": report.count,
        "explained": report.explained,
        "grew": dict(report.grew),
        **traced,
    }


def _plain(trace: NonfiniteTrace, name: str) -> JSON:
    value = getattr(trace, name)
    return list(value) if isinstance(value, tuple) else value


def _short(culprit: Culprit) -> dict[str, JSON]:
    return {
        **asdict(culprit.at),
        "sequence": culprit.sequence,
        "token_id": culprit.token_id,
        "cause": culprit.cause.value,
        "why": culprit.why,
        "contribution": culprit.contribution,
        "share": culprit.share,
        "own_norm": None if culprit.own is None else culprit.own.norm,
    }


def _largest(layers: Mapping[str, float]) -> dict[str, float]:
    """Return the largest layers, and what the others have together."""
    ordered = sorted(layers.items(), key=lambda item: -item[1])
    kept = dict(ordered[:MOST_LAYERS])
    rest = [share for _, share in ordered[MOST_LAYERS:]]
    return kept | ({"others": sum(rest)} if rest else {})


def _culprits(culprits: Sequence[Culprit], hosts: Sequence[HostPass], decode: Decode | None) -> Columns:
    """Return culprits in columns, with the numbers that are known of all of them."""
    columns: Columns = {
        "microbatch": np.array([c.at.microbatch for c in culprits], dtype=np.int64),
        "sequence": np.array([c.sequence for c in culprits], dtype=np.int64),
        "position": np.array([c.at.position for c in culprits], dtype=np.int64),
    }
    if all(c.token_id is not None for c in culprits):
        columns["token_id"] = np.array([c.token_id for c in culprits], dtype=np.int64)
    numbers = [{"contribution": c.contribution, "share": c.share, **c.numbers} for c in culprits]
    for name in (*NUMBERS, "contribution", "share"):
        values = [one.get(name) for one in numbers]
        if None not in values:
            columns[name] = np.array(values, dtype=np.float64)
    columns |= _identity(culprits, hosts, with_text=decode is not None)
    columns["cause"] = [c.cause.value for c in culprits]
    columns["why"] = [c.why for c in culprits]
    columns["verified"] = np.array([c.own is not None for c in culprits], dtype=np.int64)
    columns["own_norm"] = np.array([0.0 if c.own is None else c.own.norm for c in culprits])
    columns["layers"] = [json.dumps({} if c.own is None else dict(c.own.layers)) for c in culprits]
    if decode is not None:
        texts = [_around(c.at, hosts, decode) for c in culprits]
        columns |= {name: [text[i] for text in texts] for i, name in enumerate(("before", "text", "after"))}
        places = [_text_position(c.at, hosts, decode) if i < MOST_PLACED else UNKNOWN for i, c in enumerate(culprits)]
        columns["text_position"] = np.array(places, dtype=np.int64)
    return columns


def _identity(culprits: Sequence[Culprit], hosts: Sequence[HostPass], *, with_text: bool) -> Columns:
    """Return the identity of the responses, as the trainer gave it; :data:`UNKNOWN` or "" for missing values.

    Prompts only ``with_text``.
    """
    known = [_host(c.at, hosts) for c in culprits]
    names = [name for name in IDENTITY if any(host is not None and name in host.identity for host in known)]
    columns: Columns = {}
    for name in names:
        if name == "prompt" and not with_text:
            continue
        values = [
            None if host is None or name not in host.identity else host.identity[name][c.at.row]
            for c, host in zip(culprits, known, strict=True)
        ]
        if IDENTITY[name] is int:
            whole = [int(v) if isinstance(v, int) and abs(v) < 2**63 else UNKNOWN for v in values]
            columns[name] = np.array(whole, dtype=np.int64)
        else:
            columns[name] = ["" if v is None else str(v)[:MOST_TEXT] for v in values]
    return columns


def _host(at: TokenAt, hosts: Sequence[HostPass]) -> HostPass | None:
    return next((host for host in hosts if (host.rank, host.microbatch) == (at.rank, at.microbatch)), None)


def _text_position(at: TokenAt, hosts: Sequence[HostPass], decode: Decode) -> int:
    """Count the characters of the response before the token."""
    host = _host(at, hosts)
    if host is None or host.ids is None:
        return UNKNOWN
    before = [int(token) for token in host.ids[at.row, : at.position]]
    return len(decode(before)) if before else 0


def _around(at: TokenAt, hosts: Sequence[HostPass], decode: Decode) -> tuple[str, str, str]:
    """Return the text before the token, its own, and that after it, within its response."""
    host = _host(at, hosts)
    if host is None or host.ids is None:
        return "", "", ""
    ids, on = host.ids[at.row], host.mask[at.row]
    before = [int(ids[t]) for t in range(max(0, at.position - WINDOW), at.position) if on[t]]
    after = [int(ids[t]) for t in range(at.position + 1, min(len(ids), at.position + 1 + WINDOW)) if on[t]]
    return decode(before) if before else "", decode([int(ids[at.position])]), decode(after) if after else ""


def _stretches(
    culprits: Sequence[Culprit], rank: int, context: int, most: int
) -> Iterator[tuple[tuple[int, int], set[int]]]:
    """Return the first ``most`` (micro-batch, row) with culprits, and the positions to keep of each."""
    kept: dict[tuple[int, int], set[int]] = {}
    for culprit in culprits:
        at = culprit.at
        where = (at.microbatch, at.row)
        if at.rank == rank and (where in kept or len(kept) < most):
            kept.setdefault(where, set()).update(range(at.position - context, at.position + context + 1))
    yield from kept.items()


def _response(host: HostPass, row: int, kept: np.ndarray, decode: Decode | None) -> Columns:
    columns: Columns = {
        "microbatch": np.full(len(kept), host.microbatch, dtype=np.int64),
        "sequence": np.full(len(kept), host.first_row + row, dtype=np.int64),
        "position": kept,
    }
    if host.ids is not None:
        columns["token_id"] = host.ids[row, kept]
    columns |= {name: values[row, kept] for name, values in host.columns.items()}
    if decode is not None and host.ids is not None:
        columns["text"] = [decode([int(token)]) for token in host.ids[row, kept]]
    return columns


def _contributions(contributions: Any, norm: float) -> Columns:
    values = np.asarray(contributions, dtype=np.float64)
    columns: Columns = {"contribution": values}
    if norm:
        columns["share"] = values / norm
    return columns


def _joined(parts: Sequence[np.ndarray | Sequence[str]]) -> np.ndarray | Sequence[str]:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate([np.asarray(part) for part in parts])
    return [str(text) for part in parts for text in part]
