"""How the variance of log-ratios grows with the length of responses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from rlwatch.tensors.masked import keep
from rlwatch.tensors.mergeable import Stat


@dataclass(frozen=True, slots=True)
class Growth(Stat):
    """Growth of the variance of a response's log-ratio with its length, nats^2 per token.

    Per response: T tokens and S, the sum of their log-ratios. With m = sum S / sum T over responses, the slope of the
    least-squares line of (S - m T)^2 on T. Independent tokens of standard deviation s give s^2, and then responses of
    T tokens have an effective sample size of exp(-s^2 T); more means that the deviations within a response go
    together. May be negative on a sample.

    ``count`` is the number of responses with tokens; once settled, 0 where all are of one length. ``sums`` (8,) over
    responses are in float64 where the device has it.
    """

    sums: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Self:
        """Of the token log-ratios ``x`` (B, T) inside ``mask``."""
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        s, t = keep(x, mask, 0.0).sum(-1, dtype=dtype), mask.bool().sum(-1).to(dtype)
        columns = t, t * t, t**3, s, s * s, s * t, s * s * t, s * t * t
        return cls((t > 0).sum().to(dtype), torch.stack([column.sum() for column in columns]))

    @override
    def merge(self, other: Self) -> Self:
        return type(self)(self.count + other.count, self.sums + other.sums)

    @override
    def settle(self) -> Self:
        t, tt = self.sums[:2].unbind()
        return replace(self, count=torch.where(self.count * tt > t * t, self.count, 0.0))

    @override
    def value(self) -> Tensor:
        n, (t, tt, ttt, s, ss, st, sst, stt) = self.count, self.sums.unbind()
        m = s / t
        squares = ss - 2 * m * st + m * m * tt
        products = sst - 2 * m * stt + m * m * ttt
        return (n * products - t * squares) / (n * tt - t * t)
