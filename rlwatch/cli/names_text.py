"""Names of a log as text: what they were taken for; the same for scan, import and watch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from rlwatch.cli.console import say
from rlwatch.metrics import canonicalise, resolve, unjudged, unread

SHOWN = 12
"""Names in a line."""


def reading_lines(names: Collection[str], source: str) -> list[str]:
    """Lines that say what a run's names were read as, and which nothing reads; a known trainer's need no telling.

    >>> for line in reading_lines(["reward", "avg_kl", "lr", "H", "timing_s/gen"], ""): print(line)
    read as: lr as optim/lr, reward as reward/mean; by their words: avg_kl as policy/kl_ref
    not known, so nothing judges them: H
    known and not judged: 1 speed, which tells nothing of learning
    """
    _, origin = canonicalise(dict.fromkeys(sorted(names), math.nan), source)
    plainly, guessed = [], []
    for metric, name in origin.items():
        read = resolve(name, source)
        if read is not None and read.guess:
            guessed.append(f"{name} as {metric}")
        elif not source and name != metric:
            plainly.append(f"{name} as {metric}")
    parts = [f"read as: {some(plainly)}"] if plainly else []
    parts += [f"{'by' if plainly else 'read by'} their words: {some(guessed)}"] if guessed else []
    lines = ["; ".join(parts)] if parts else []
    strange = unread(names, source)
    if unknown := [name for name in strange if not unjudged(name)]:
        lines.append(f"not known, so nothing judges them: {some(unknown)}")
    if counted := Counter(filter(None, map(unjudged, strange))):
        lines.append(f"known and not judged: {some([f'{n} {reason}' for reason, n in counted.most_common()])}")
    return lines


def print_names(names: Collection[str], source: str, printed: Callable[..., object] = say) -> None:
    """Print these lines."""
    for line in reading_lines(names, source):
        printed(line, style="dim")


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
