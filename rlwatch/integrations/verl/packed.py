"""verl packs sequences of unequal length one after the other; a loss takes of them what predicts the responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rlwatch.errors import RLWatchError
from rlwatch.tensors.padded import longest_row


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the responses of a micro-batch lie: ``places`` (B, T) in the packed values, ``valid`` (B, T) where at all.

    What a model computes at a position is of the next token, so a response begins one place before its first token.
    """

    places: Tensor
    valid: Tensor

    @classmethod
    def of(cls, data: Any, width: int | None = None) -> Self:
        """Of verl's micro-batch ``data`` with jagged sequences, padded to ``width`` (default: the longest response).

        Waits for the device if ``width`` is not given and the jagged tensor does not know it.
        Raises ``RLWatchError`` if the sequences are not jagged.
        """
        sequences, responses = data["input_ids"], data["responses"]
        if not (sequences.is_nested and responses.is_nested):
            raise RLWatchError("verl's sequences are not jagged")
        ends, lengths = sequences.offsets()[1:], responses.offsets().diff()
        known = longest_row(responses) if width is None else width
        column = torch.arange(int(lengths.max()) if known is None else known, device=ends.device)
        valid = column < lengths.unsqueeze(1)
        return cls(torch.where(valid, (ends - lengths - 1).unsqueeze(1) + column, 0), valid)

    @property
    def width(self) -> int:
        """T."""
        return int(self.places.shape[1])

    def take(self, packed: Tensor) -> Tensor:
        """(B, T) of ``packed``, jagged over whole sequences; 0 where there is no response. Differentiable."""
        return torch.where(self.valid, packed.values()[self.places], 0.0)
