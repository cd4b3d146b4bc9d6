"""What a loop passes of one generation, read as a :class:`~rlwatch.tensors.responses.ResponseBatch`.

An input of another number of responses than the first, or that cannot be read, is left out, alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlwatch.integrations.torch.microbatch import measured, there, why
from rlwatch.seam import by_a_signal
from rlwatch.tensors.responses import ResponseBatch, TaskNames

WIDE = ("ids", "mask")
"""(B, T); all others are (B,)."""


class GenerationReader:
    """Reads the generations of a run. ``refused`` says of every input that was left out of the last one why."""

    def __init__(self, eos: tuple[int, ...] = ()) -> None:
        self.refused: dict[str, str] = {}
        self._eos = eos
        self._tasks = TaskNames()

    def read(self, inputs: Mapping[str, Any]) -> ResponseBatch | None:
        """The batch; None if nothing that fits was given."""
        self.refused = {}
        fitting = self._fitting({name: value for name, value in inputs.items() if value is not None})
        while fitting:
            try:
                return self._made(fitting)
            except Exception as misfit:
                if by_a_signal(misfit):
                    raise
                name = self._culprit(fitting)
                self.refused[name] = why(misfit)
                del fitting[name]
        return None

    def _made(self, fitting: Mapping[str, Any]) -> ResponseBatch:
        return ResponseBatch.of(**fitting, task_names=self._tasks, eos=self._eos)

    def _culprit(self, fitting: Mapping[str, Any]) -> str:
        """Who cannot be read even alone; else who goes with another: a mask with ids, groups with all."""
        for name, value in fitting.items():
            if name not in ("mask", "groups"):
                try:
                    self._made({name: value})
                except Exception as misfit:
                    if by_a_signal(misfit):
                        raise
                    return name
        return next((name for name in ("mask", "groups") if name in fitting), next(iter(fitting)))

    def _fitting(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of as many responses as the first one."""
        fitting: dict[str, Any] = {}
        first: tuple[str, int] | None = None
        for name, value in given.items():
            try:
                if name == "groups" and isinstance(value, Integral):
                    fitting[name] = value
                    continue
                fitting[name] = column = _column(name, value)
                first = first or (name, len(column))
                if len(column) != first[1]:
                    raise ValueError(f"it is of {len(column)} responses where {first[0]} is of {first[1]}")
            except Exception as misfit:
                if by_a_signal(misfit):
                    raise
                self.refused[name] = why(misfit)
                fitting.pop(name, None)
        return fitting


def _column(name: str, value: Any) -> Any:
    """``value`` as one thing a response, or one row a response. Raises ``ValueError`` if it is neither."""
    if isinstance(value, Tensor) and value.is_nested and value.layout == torch.strided:
        return list(value.unbind())
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, Tensor) or value.is_nested:
        return value
    value = there(measured(value))
    wanted = "(B, T)" if name in WIDE else "(B,)"
    if name not in WIDE and value.dim() == 2 and value.shape[1] == 1:
        value = value.squeeze(1)
    if value.dim() != (2 if name in WIDE else 1):
        raise ValueError(f"it has shape {tuple(value.shape)} where {wanted} is needed")
    return value.detach() if name in WIDE else value.detach().clone()  # kept until the step ends
