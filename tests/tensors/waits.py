"""Sees operations that would make a CPU wait for a GPU, without a GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item", "_unique2", "unique_dim"}


class CountWaits(TorchDispatchMode):
    """Counts operations that would make a CPU wait for a GPU, and draws of random numbers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indexed_by_mask = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in WAITS or indexed_by_mask or torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
