"""All measures of a few sampled completions, under their canonical names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlwatch.text.compression import repeats, zlib_ratio
from rlwatch.text.drift import Drift, prefix_kept
from rlwatch.text.garbled import Garbled

CHARACTERS = 20_000
"""Of the end of a text that are looked at: where it degenerates."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    Parameters
    ----------
    text
        As decoded; None where it is not known.
    ids, again
        Sampled ids, and the same after :func:`~rlwatch.text.drift.encode_again`; None where they are not known.
    turns
        Prompt and response ids of each turn of a conversation, in order.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    again: Sequence[int] | None = None
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


def text_report(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over ``samples`` of what each can tell; what none can is absent. Canonical names, see the metric table."""
    texts = [sample.text[-CHARACTERS:] for sample in samples if sample.text is not None]
    return {**_compression(texts), **_characters(texts), **_drift(samples), **_turns(samples)}


def _compression(texts: Sequence[str]) -> dict[str, float]:
    ratios = [ratio for text in texts if (ratio := zlib_ratio(text)) is not None]
    return {
        **_mean("text/zlib_ratio", ratios),
        **({"text/zlib_ratio_max": max(ratios)} if ratios else {}),
        **_mean("text/repetition_frac", map(repeats, texts)),
    }


def _characters(texts: Sequence[str]) -> dict[str, float]:
    found = [garbled for text in texts if (garbled := Garbled.of(text)) is not None]
    return {
        **_mean("text/garbled", (one.garbled for one in found)),
        **_mean("text/replacement", (one.replacement for one in found)),
        **_mean("text/script_switches", (one.script_switches for one in found)),
    }


def _drift(samples: Sequence[Sample]) -> dict[str, float]:
    pairs = ((sample.ids, sample.again) for sample in samples)
    known = (Drift.of(ids, again) for ids, again in pairs if ids is not None and again is not None)
    found = [drift for drift in known if drift is not None]
    return {
        **_mean("text/retok_exact", (drift.exact for drift in found)),
        **_mean("text/retok_naive", (drift.naive for drift in found)),
        **_mean("text/retok_edit", (drift.edits for drift in found)),
        **_mean("text/retok_first", (drift.first for drift in found if drift.first is not None)),
        **_mean("text/retok_growth", (drift.growth for drift in found)),
    }


def _turns(samples: Sequence[Sample]) -> dict[str, float]:
    counts = [prefix_kept(sample.turns) for sample in samples]
    kept, could = sum(kept for kept, _ in counts), sum(could for _, could in counts)
    return {"text/turn_prefix_kept": kept / could} if could else {}


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    """Absent where there is no value."""
    measured = list(values)
    return {name: fmean(measured)} if measured else {}
