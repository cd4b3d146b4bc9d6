"""The seam to the model's own code: any kernel of any model may refuse what is asked of it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlwatch.seam import by_a_signal, described

T = TypeVar("T")

SHOWN = 200
"""Characters of an error that are told."""


def tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """What ``work()`` gives and "", or None and why: an operation without derivative, a kernel, memory.

    Raises no ``Exception``: with several ranks the others wait for this one's word and must hear of it. Of an error
    its type and the first line are told.
    """
    try:
        return work(), ""
    except Exception as error:
        if by_a_signal(error):
            raise
        most = len(f"{type(error).__name__}: ") + SHOWN  # what a kernel raises has no common type
        return None, next(iter(described(error, most).splitlines()))
