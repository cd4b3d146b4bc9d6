"""Reading tqdm progress bars: ``  3%|▎         | 12/375 [01:02<31:12,  5.16s/it]``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BAR = re.compile(r"(?<!\d)\d{1,3}%\|[^|]*\| *(?P<n>\d{1,15})/(?P<total>\d{1,15}) \[[^\]{]*\]?")


@dataclass(frozen=True, slots=True)
class Bar:
    """One state of a progress bar; ``start`` and ``end`` are its place in the text it was found in."""

    n: int
    total: int
    title: str
    start: int
    end: int

    @property
    def may_count_steps(self) -> bool:
        """Whether it may be the trainer's own bar: that one has no title (``Map:``, ``Loading shards:`` have)."""
        return not self.title or "train" in self.title.lower()


def bars(text: str) -> Iterator[Bar]:
    """The bars in ``text``, left to right."""
    if "%|" not in text:
        return
    end = 0
    for match in _BAR.finditer(text):
        title = text[end : match.start()].rpartition("}")[2].strip(" :")  # "}" ends a row of metrics before the bar
        end = match.end()
        yield Bar(int(match["n"]), int(match["total"]), title, match.start(), end)
