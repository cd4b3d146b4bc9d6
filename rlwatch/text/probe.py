"""A report on a few completions now and then, made on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from rlwatch.clock import Clock, SystemClock
from rlwatch.errors import ConfigError
from rlwatch.seam import described
from rlwatch.text.drift import Tokenizer, encode_again
from rlwatch.text.report import Sample, text_report


class TextProbe:
    """Takes samples from the thread that trains, without making it wait, and has their report ready later.

    ``offer`` what was generated whenever it is at hand, and ``take`` the report with the next step; both cost
    microseconds. What the work raised, ``take`` raises, once.

    Parameters
    ----------
    tokenizer
        Decodes ids where a sample has no text, and encodes them again to see whether ids drift; None: neither is
        done. It must not be the trainer's own object (``copy.deepcopy`` it): tokenizers of Hugging Face refuse work
        while another thread uses them.
    most
        Samples a report is made of at most, spread evenly over those offered.
    seconds
        Between two reports at least. Raises ``ConfigError`` for a negative number, or less than one sample.
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
        self._tokenizer = tokenizer
        self._most, self._seconds = most, seconds
        self._clock = clock or SystemClock()
        self._last: float | None = None
        self._work: Future[dict[str, float]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def due(self) -> bool:
        """Whether an offer would be taken: nothing is under way or waits to be taken, and enough time has passed."""
        rested = self._last is None or self._clock.monotonic() - self._last >= self._seconds
        return self._work is None and rested

    def offer(self, samples: Sequence[Sample]) -> bool:
        """Begin a report on some of ``samples``, if one is due; whether it has begun."""
        if not samples or not self.due():
            return False
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlwatch-text")
        self._last = self._clock.monotonic()
        self._work = self._thread.submit(self._report, _spread(samples, self._most))
        return True

    def take(self, *, wait: bool = False) -> dict[str, float]:
        """The report that has become ready since the last call; empty if none has. ``wait`` for one under way."""
        work = self._work
        if work is None or not (wait or work.done()):
            return {}
        self._work = None
        error = work.exception()
        if error is not None and not isinstance(error, Exception):  # a tokenizer's exit is not the trainer's
            raise RuntimeError(f"text could not be measured: {described(error)}")
        return work.result()

    def close(self) -> None:
        """Begin nothing more. What is under way ends by itself."""
        self._last = float("inf")
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _report(self, samples: Sequence[Sample]) -> dict[str, float]:
        return text_report([self._complete(sample) for sample in samples])

    def _complete(self, sample: Sample) -> Sample:
        """With its text and its ids encoded again, where a tokenizer can tell."""
        if self._tokenizer is None or sample.ids is None:
            return sample
        text = self._tokenizer.decode(list(sample.ids)) if sample.text is None else sample.text
        again = encode_again(self._tokenizer, sample.ids) if sample.again is None else sample.again
        return replace(sample, text=text, again=again)


def _spread(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most ``most`` of them, evenly, without chance."""
    n = min(most, len(samples))
    return [samples[i * len(samples) // n] for i in range(n)]
