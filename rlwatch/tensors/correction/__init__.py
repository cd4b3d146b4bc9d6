"""What verl 0.9.1 reports of its rollout correction, number for number, and the raw weights it hides.

:func:`correction_report` is a function of one whole batch, as verl's is: most of its numbers cannot be merged over
micro-batches, and several are taken from weights that were truncated first. It serves to compare with a verl run
and to look at thresholds one does not train with. The live stream has :mod:`rlwatch.tensors.mismatch` instead.
"""

from __future__ import annotations

from rlwatch.tensors.correction.report import correction_report

__all__ = ["correction_report"]
