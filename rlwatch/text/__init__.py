"""Measures of sampled text: compression, garbled characters, ids that do not survive decoding.

Nothing here needs torch or a tokenizer of a certain library, and all of it is for a few completions a step, off the
thread that trains: :func:`text_report` of :class:`Sample`.
"""

from __future__ import annotations

from rlwatch.text.probe import TextProbe
from rlwatch.text.report import Sample, text_report

__all__ = ["Sample", "TextProbe", "text_report"]
