"""Models that DDP keeps alike on every rank, as far as looking at them needs care."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def unsynchronised() -> Iterator[None]:
    """On this thread, forward passes through DDP's wrappers run what they wrap and no more.

    By itself a wrapper sends buffers round before a forward pass, agrees on new buckets after the first backward, and
    expects gradients of every parameter afterwards: ranks with other passes, and the next step, would wait for ever.
    A forward pass may hold a wrapper that the model looked at does not have inside, so it is all of them.
    """
    forward, here = DistributedDataParallel.forward, threading.get_ident()

    def bare(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        if self.device_ids:
            from torch.distributed.utils import _to_kwargs

            device = torch.device(self.device_type, self.device_ids[0])
            (args,), (kwargs,) = _to_kwargs(args, kwargs, device, False)
        return self.module(*args, **kwargs)

    DistributedDataParallel.forward = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]
