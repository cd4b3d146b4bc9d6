"""Measures of generated text: compression, garbled characters, and token ids that change when text is encoded again.

Nothing here needs torch or the tokenizer of a certain library. All of it is for a few completions a step, outside the
training thread: :func:`text_report` of :class:`Sample`.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Protocol

from rlwatch.clock import Clock, SystemClock
from rlwatch.error_boundary import described
from rlwatch.errors import ConfigError

__all__ = ["Sample", "TextProbe", "text_report"]


# All measures of a few sampled completions, under their canonical names.

CHARACTERS = 20_000
"""Number of characters at the end of a text that are measured: there it degenerates."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion whose text and token ids are to be measured.

    Parameters
    ----------
    text
        Decoded text; None where it is not known.
    ids, again
        Sampled ids, and the ids of the same text encoded again (:func:`~rlwatch.text.retokenized`); None where not
        known.
    turns
        Prompt and response ids of each turn of a conversation, in order.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    again: Sequence[int] | None = None
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


def text_report(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics ``text/...`` (canonical name -> value) of the completions ``samples``.

    Each is a mean over the completions for which the quantity is known (for ``text/zlib_ratio_max`` the maximum); a
    quantity that is known for none is absent.
    """
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
    measured = [garbled for text in texts if (garbled := Garbled.of(text)) is not None]
    return {
        **_mean("text/garbled", (one.garbled for one in measured)),
        **_mean("text/replacement", (one.replacement for one in measured)),
        **_mean("text/script_switches", (one.script_switches for one in measured)),
    }


def _drift(samples: Sequence[Sample]) -> dict[str, float]:
    pairs = ((sample.ids, sample.again) for sample in samples)
    known = (RetokenizationDrift.of(ids, again) for ids, again in pairs if ids is not None and again is not None)
    drifts = [drift for drift in known if drift is not None]
    return {
        **_mean("text/retok_exact", (drift.exact for drift in drifts)),
        **_mean("text/retok_naive", (drift.naive for drift in drifts)),
        **_mean("text/retok_edit", (drift.edits for drift in drifts)),
        **_mean("text/retok_first", (drift.first for drift in drifts if drift.first is not None)),
        **_mean("text/retok_growth", (drift.growth for drift in drifts)),
    }


def _turns(samples: Sequence[Sample]) -> dict[str, float]:
    counts = [prefix_kept(sample.turns) for sample in samples]
    kept, could = sum(kept for kept, _ in counts), sum(could for _, could in counts)
    return {"text/turn_prefix_kept": kept / could} if could else {}


def _mean(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return the mean under ``name``; an empty dict where there is no value."""
    measured = list(values)
    return {name: fmean(measured)} if measured else {}


# Compression: loops compress far better than prose.

SHORTEST_BYTES = 200
"""Number of bytes below which the header of the format would dominate the ratio."""

REPETITION_WINDOW = 10_000
"""Number of characters at the end of a text that :func:`repeats` examines; shorter texts are never flagged."""

REPETITION_RATIO = 10.0
"""Compression ratio above which a text repeats itself."""


def zlib_ratio(text: str) -> float | None:
    """Return the compression ratio of ``text``: its bytes in UTF-8 over its bytes after zlib at level 9.

    English prose has 2 to 3; loops have far more. None below :data:`SHORTEST_BYTES` bytes.

    >>> round(zlib_ratio("!" * 4096), 3)
    146.286
    """
    raw = text.encode(errors="surrogatepass")
    return len(raw) / len(zlib.compress(raw, 9)) if len(raw) >= SHORTEST_BYTES else None


def repeats(text: str) -> bool:
    """Return whether a text has more than 10,000 characters and its last 10,000 compress more than tenfold.

    The rule is that of slime (``slime/utils/metric_utils.py``, ``has_repetition``).
    """
    ratio = zlib_ratio(text[-REPETITION_WINDOW:]) if len(text) > REPETITION_WINDOW else None
    return ratio is not None and ratio > REPETITION_RATIO


# Characters no writer writes: of broken decoding, of a model that has lost its language.

REPLACEMENT = "�"
"""Character that a decoder puts in place of bytes that are not UTF-8."""

_NEVER_WRITTEN = {"Cc", "Co", "Cn", "Cs"}  # control, private use, unassigned, surrogate
_LAYOUT = set("\t\n\r")
_ONE_SCRIPT = {"CJK": "EAST ASIAN", "HIRAGANA": "EAST ASIAN", "KATAKANA": "EAST ASIAN", "BOPOMOFO": "EAST ASIAN"}
_NO_SCRIPT = {
    "MATHEMATICAL",
    "FULLWIDTH",
    "HALFWIDTH",
    "DOUBLE-STRUCK",
    "SCRIPT",
    "MODIFIER",
    "FEMININE",
    "MASCULINE",
    "MICRO",
}
"""First words of Unicode names of letters that texts in every script use."""


@dataclass(frozen=True, slots=True)
class Garbled:
    """Signs of broken text in one completion.

    ``garbled``: share of characters that no writer uses (control, unassigned, U+FFFD). ``replacement``: share that are
    U+FFFD. ``script_switches``: changes of the writing system per 100 characters.
    """

    garbled: float
    replacement: float
    script_switches: float

    @classmethod
    def of(cls, text: str) -> Garbled | None:
        """Measure ``text``; None for an empty one."""
        if not text:
            return None
        replaced = text.count(REPLACEMENT)
        broken = replaced + sum(map(_never_written, text))
        return cls(broken / len(text), replaced / len(text), 100 * script_switches(text) / len(text))


def script_switches(text: str) -> int:
    """Count the letters of ``text`` that belong to another writing system than the letter before them.

    Han, kana and bopomofo count as one system; letters of mathematics and full-width forms belong to none.

    >>> script_switches("the кот sat 猫 on")
    4
    """
    return sum(here != before for before, here in pairwise(_scripts(text)))


def _scripts(text: str) -> Iterator[str]:
    """Yield the writing system of each letter of a text."""
    for character in text:
        script = _script(character)
        if script is not None:
            yield script


@lru_cache(maxsize=16_384)
def _script(character: str) -> str | None:
    """Return the writing system of a letter: the first word of its Unicode name; None if it is no letter, or in any
    script.
    """
    if unicodedata.category(character) not in {"Lu", "Ll", "Lt", "Lo"}:
        return None
    word = unicodedata.name(character, "").partition(" ")[0]
    return None if not word or word in _NO_SCRIPT else _ONE_SCRIPT.get(word, word)


def _never_written(character: str) -> bool:
    return character not in _LAYOUT and unicodedata.category(character) in _NEVER_WRITTEN


# Ids that do not survive decoding: what is trained on is then not what was sampled.
#
# Text is ambiguous: ``<``, ``think``, ``>`` may be sampled and ``<th``, ``ink``, ``>`` encoded. A trainer that
# re-encodes text computes log-probs of tokens that were not sampled, which looks like a huge mismatch of the engines.

MOST_IDS = 8192
"""Largest number of ids of a response that are compared: the time for it grows with their square."""


class Tokenizer(Protocol):
    """Interface of a tokenizer, with the two methods needed here as Hugging Face tokenizers have them."""

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str:
        """Return the text of ``token_ids``."""
        ...

    def encode(self, text: str, **kwargs: bool) -> Sequence[int]:
        """Return the token ids of ``text``."""
        ...


def retokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the token ids of the text of ``ids``: encode(decode(ids)), with special tokens kept and none added.

    Spaces are not cleaned up. Pass a tokenizer that no other thread uses (``copy.deepcopy``): Hugging Face tokenizers
    refuse work while another thread uses them, which may be the training thread.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class RetokenizationDrift:
    """Differences between the sampled token ids of a response and the ids of the same text encoded again.

    Parameters
    ----------
    exact
        Whether all ids are equal.
    naive
        Fraction of positions that differ, of those of the longer sequence: one early shift makes all later ones differ.
    edits
        Levenshtein distance divided by the number of sampled ids; it counts a shift once.
    first
        Position of the first difference; None if there is none.
    growth
        Number of ids that encoding again added; negative if it needs fewer.
    """

    exact: bool
    naive: float
    edits: float
    first: int | None
    growth: int

    @classmethod
    def of(cls, sampled: Sequence[int], again: Sequence[int]) -> RetokenizationDrift | None:
        """Compare the first :data:`MOST_IDS` sampled ids with the ids of the text encoded again; None where nothing was
        sampled.

        >>> RetokenizationDrift.of([1, 2, 3, 4], [1, 9, 4])
        RetokenizationDrift(exact=False, naive=0.75, edits=0.5, first=1, growth=-1)
        """
        if not sampled:
            return None
        first, growth = first_difference(sampled, again), len(again) - len(sampled)
        if first is None:
            return cls(True, 0.0, 0.0, None, growth)
        sampled, again = sampled[:MOST_IDS], again[:MOST_IDS]
        longer = max(len(sampled), len(again))
        equal = sum(one == other for one, other in zip(sampled, again, strict=False))
        return cls(False, 1 - equal / longer, levenshtein(sampled, again) / len(sampled), first, growth)


def prefix_kept(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[int, int]:
    """Count the turns of a conversation whose prompt begins with the complete turn before; return (count, possible
    count).

    ``turns``: (prompt ids, response ids) of each turn. A chat template that renders the history anew may not keep it.
    """
    kept = 0
    for (prompt, response), (following, _) in pairwise(turns):
        before = [*prompt, *response]
        kept += list(following[: len(before)]) == before
    return kept, max(0, len(turns) - 1)


def levenshtein(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the smallest number of insertions, deletions and substitutions that turn ``first`` into ``second``.

    >>> levenshtein([1, 2, 3, 4], [1, 9, 4])
    2
    """
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance(first, second)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the first position at which two sequences of ids differ or one has ended; None if they are equal."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return None if len(first) == len(second) else min(len(first), len(second))


# A report on a few completions now and then, made on a thread of its own.


class TextProbe:
    """Measures a few completions now and then on a thread of its own, so that the training thread need not wait.

    Call :meth:`offer` with the completions whenever they are at hand, and :meth:`take` for the report with the next
    step; both cost microseconds. An error of the measurement is raised by ``take``, once.

    Parameters
    ----------
    tokenizer
        Decodes ids where a sample has no text, and encodes text again to find ids that change; None: neither is done.
        It must not be the trainer's own object (``copy.deepcopy`` it): Hugging Face tokenizers refuse work while
        another thread uses them.
    most
        Largest number of samples in a report, spread evenly over those offered.
    seconds
        Smallest time between two reports.
    clock
        Clock for ``seconds``; None: the machine's.

    Raises
    ------
    ConfigError
        For a negative ``seconds``, or ``most`` below 1.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        most: int = 4,
        seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        if most < 1 or not seconds >= 0:
            raise ConfigError(f"a text probe needs most >= 1 and seconds >= 0, got {most!r} and {seconds!r}")
        self.tokenizer = tokenizer
        self._most, self._seconds = most, seconds
        self._clock = clock or SystemClock()
        self._last: float | None = None
        self._work: Future[dict[str, float]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def due(self) -> bool:
        """Return whether an offer would be accepted: no report is being made or waits to be taken, and enough time has
        passed.
        """
        rested = self._last is None or self._clock.monotonic() - self._last >= self._seconds
        return self._work is None and rested

    def offer(self, samples: Sequence[Sample]) -> bool:
        """Begin a report on some of ``samples``, if one is due; return whether it has begun."""
        if not samples or not self.due():
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlwatch-text")
        self._last = self._clock.monotonic()
        self._work = self._thread.submit(self._report, _spread(samples, self._most))
        return True

    def take(self, *, wait: bool = False) -> dict[str, float]:
        """Return the report that was completed since the last call, as metric -> value; empty if there is none.

        ``wait``: wait for a report that is being made. Raises the error of the measurement, if it failed.
        """
        work = self._work
        if work is None or not (wait or work.done()):
            return {}
        self._work = None
        error = work.exception()
        if error is not None and not isinstance(error, Exception):  # a tokenizer's exit is not the trainer's
            raise RuntimeError(f"text could not be measured: {described(error)}")
        return work.result()

    def settle(self, deadline_s: float | None = None) -> bool:
        """Wait at most ``deadline_s`` seconds for the report that is being made; return False if it is not ready by
        then.

        The report can still be taken.
        """
        return self._work is None or not wait([self._work], deadline_s).not_done

    def close(self) -> None:
        """Begin no further report; one that is being made ends by itself."""
        self._last = float("inf")
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _report(self, samples: Sequence[Sample]) -> dict[str, float]:
        return text_report([self._complete(sample) for sample in samples])

    def _complete(self, sample: Sample) -> Sample:
        """Complete a sample with its text and its ids encoded again, where there is a tokenizer."""
        if self.tokenizer is None or sample.ids is None:
            return sample
        text = self.tokenizer.decode(list(sample.ids)) if sample.text is None else sample.text
        again = retokenized(self.tokenizer, sample.ids) if sample.again is None else sample.again
        return replace(sample, text=text, again=again)


def _spread(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Choose at most ``most`` of the samples, evenly spaced."""
    n = min(most, len(samples))
    return [samples[i * len(samples) // n] for i in range(n)]
