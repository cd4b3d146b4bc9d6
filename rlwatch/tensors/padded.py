"""Convert rows of unequal length to one right-padded tensor: nested tensors, lists of tensors, lists of numbers.

No function waits for a device. The longest row of a jagged tensor on a device must be known, because reading it would
wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class Padded:
    """A right-padded, detached tensor ``values`` (B, T, ...), made from rows of unequal length.

    ``valid`` (B, T) bool is True for values that are not padding; None if a whole tensor was given. ``lengths``: those
    of the rows; None if only the device has them.
    """

    values: Tensor
    valid: Tensor | None = None
    lengths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Any, *, longest: int | None = None) -> Self:
        """Pad a tensor, a nested tensor (strided or jagged in its second dimension), or a list of rows.

        Padding is NaN for floating types, else 0; a row that is too short for its mask then shows as NaN. ``longest``:
        length of the longest row, for a jagged tensor that does not know it itself. Raises ``ValueError`` with the
        reason if ``x`` cannot be converted.
        """
        with torch.no_grad():
            if isinstance(x, Tensor):
                return cls._of_tensor(x.detach() if x.requires_grad else x, longest)
            if isinstance(x, Sequence) and not isinstance(x, str | bytes):
                return cls._of_rows(x)
            return cls(_as_tensor(x))

    @classmethod
    def _of_tensor(cls, x: Tensor, longest: int | None) -> Self:
        if not x.is_nested:
            return cls(x)
        return cls._of_jagged(x, longest) if x.layout == torch.jagged else cls._of_rows(x.unbind())

    @classmethod
    def _of_rows(cls, rows: Sequence[Any]) -> Self:
        """Rows are tensors or sequences (T_i, ...); a list of numbers is a whole tensor (B,)."""
        tensors = [row.detach() if isinstance(row, Tensor) else _as_tensor(row) for row in rows]
        if all(row.dim() == 0 for row in tensors):
            return cls(torch.stack(tensors) if tensors else torch.zeros(0, device="cpu"))
        if any(row.dim() == 0 for row in tensors):
            raise ValueError("some of its rows are single numbers and some are not")
        lengths = tuple(row.shape[0] for row in tensors)
        dtype = reduce(torch.promote_types, [row.dtype for row in tensors if row.numel()] or [tensors[0].dtype])
        same = [row.to(dtype) for row in tensors]
        values = pad_sequence(same, batch_first=True, padding_value=_fill(same[0]))
        ends = torch.tensor(lengths, device="cpu").to(values.device, non_blocking=True)
        return cls(values, _within(ends, values.shape[1]), lengths)

    @classmethod
    def _of_jagged(cls, x: Any, longest: int | None) -> Self:
        """Gather rows by position, so that they may lie anywhere in the values (``torch.nested.narrow``)."""
        if x._ragged_idx != 1:  # noqa: SLF001
            raise ValueError("it is jagged in another dimension than the second")
        values, starts = x.values().detach(), x.offsets()[:-1]
        lengths = x.offsets().diff() if x.lengths() is None else x.lengths()
        known = longest_row(x)
        width = _asked(lengths, longest) if known is None else known
        if not values.shape[0] or not width:
            empty = values.new_zeros((lengths.shape[0], width, *values.shape[1:]))
            return cls(empty, _within(lengths, width), _known(lengths))
        valid = _within(lengths, width)
        if values.device.type == "cpu":
            return cls(_row_by_row(values, starts, lengths, width), valid, _known(lengths))
        place = starts.unsqueeze(1) + torch.arange(width, device=values.device)
        taken = values[place.clamp(max=values.shape[0] - 1)]
        apart = valid.reshape(*valid.shape, *[1] * (taken.dim() - 2))
        return cls(torch.where(apart, taken, _fill(values)), valid, _known(lengths))


def _row_by_row(values: Tensor, starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return right-padded (B, width, ...), by one copy per row: on a CPU a tenth of the cost of one gather of all
    places.
    """
    padded = values.new_full((len(starts), width, *values.shape[1:]), _fill(values))
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        kept = min(length, width)
        padded[row, :kept] = values[start : start + kept]
    return padded


_PLAIN = (list, tuple, int, float, complex, np.ndarray, np.generic, Tensor)
_ASKED_BY_TORCH = ("__cuda_array_interface__", "__dlpack__")


def tensor_of(x: Any) -> Tensor:
    """Return a list, an array or a number as a tensor on the CPU; an object without numbers raises what torch raises.

    Torch looks up attributes of other objects, and since Python 3.13 errors of that go to stderr; here they are raised.
    """
    if not isinstance(x, _PLAIN):
        any(hasattr(x, name) for name in _ASKED_BY_TORCH)
    return torch.as_tensor(x, device="cpu")


def _as_tensor(x: Any) -> Tensor:
    try:
        return tensor_of(x)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"it is no tensor and holds no rows of numbers: got {x!r:.60}") from None


def _fill(x: Tensor) -> float:
    return torch.nan if x.is_floating_point() else 0


def _within(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def _known(lengths: Tensor) -> tuple[int, ...] | None:
    return None if lengths.is_cuda else tuple(lengths.tolist())


def longest_row(x: Any) -> int | None:
    """Return the length of the longest row of a jagged tensor if the CPU knows it; None otherwise or for other
    tensors.
    """
    known = getattr(x, "_maybe_max_seqlen", None) if isinstance(x, Tensor) else None
    return None if known is None else int(known)


def _asked(lengths: Tensor, longest: int | None) -> int:
    if longest is not None:
        return longest
    if lengths.is_cuda:
        raise ValueError(
            "it is jagged and does not know its longest row; make it with max_seqlen= "
            "(torch.nested.nested_tensor_from_jagged), or pass it padded"
        )
    return max(lengths.tolist(), default=0)


# Finding rows of one table in another, without comparing all with all: that would be B x N x T truths.


_ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Factors of 64 bits (those of xxHash, as signed integers)."""


def places_of(rows: Sequence[Tensor], known: Sequence[Tensor]) -> Tensor | None:
    """Return the index (B,) of the first row of ``known`` with the same ids as each of ``rows``; -1 if there is none.

    None if the widths differ. Tables may come in parts (B, L) and (N, L) of integers, on one device. Rows are compared
    by a hash, and then with the one row of the same hash: no tensor is larger than B x N, and there is no
    synchronisation with the device.

    >>> places_of([torch.tensor([[3, 4], [9, 9]])], [torch.tensor([[1, 2], [3, 4]])]).tolist()
    [1, -1]
    """
    if any(ours.dim() != 2 or ours.shape[1:] != theirs.shape[1:] for ours, theirs in zip(rows, known, strict=True)):
        return None
    count, many = rows[0].shape[0], known[0].shape[0]
    if not many:
        return torch.full((count,), -1, dtype=torch.int64, device=rows[0].device)
    same = _hash(rows)[:, None] == _hash(known)[None]
    at = same.to(torch.uint8).argmax(1)
    right = [(ours == theirs[at]).all(1) for ours, theirs in zip(rows, known, strict=True)]
    return torch.where(torch.stack(right).all(0), at, -1)


def _hash(parts: Sequence[Tensor]) -> Tensor:
    """Return a hash (B,) of each row over all ``parts`` (B, ...) together; sums wrap around."""
    total = torch.zeros(parts[0].shape[0], dtype=torch.int64, device=parts[0].device)
    for number, part in enumerate(parts):
        place = torch.arange(part.shape[1], dtype=torch.int64, device=part.device) + 1
        mixed = (part.to(torch.int64) + place * _ODD[0] + number) * _ODD[1]
        total += ((mixed ^ (mixed >> 29)) * _ODD[2]).sum(1)
    return total
