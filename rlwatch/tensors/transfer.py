"""From the device to the CPU in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor


class Transfer:
    """Copies some tensors to the CPU together; :meth:`read` them once :meth:`ready`.

    On CUDA the copy goes to pinned memory behind an event, so creating a transfer costs no wait; elsewhere
    :meth:`read` copies. Values travel as float32, or as float64 if any tensor is float64 or int64 and the device
    knows it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._flat = _pack(tensors)
        self._event: torch.cuda.Event | None = None
        if self._flat.is_cuda:
            host = torch.empty(self._flat.shape, dtype=self._flat.dtype, device="cpu", pin_memory=True)
            host.copy_(self._flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._flat.device))
            self._flat = host

    def ready(self) -> bool:
        """Whether :meth:`read` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[np.ndarray]:
        """The tensors, in order and shape, as float64 arrays; waits for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()
        flat = self._flat.cpu().numpy().astype(np.float64)
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        pieces = np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
        return [piece.reshape(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def freed(tensor: Tensor) -> bool:
    """Whether its memory was given back (``untyped_storage().resize_(0)``): reading it would end the process."""
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except (RuntimeError, NotImplementedError):  # subclasses without a storage of their own
        return False


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """All of them in one, in order: joined by type first, because a conversion each would cost more than the copy."""
    if not tensors:
        return torch.empty(0, device="cpu")
    device = _meeting_place(tensors)
    double = device.type != "mps" and any(tensor.dtype in (torch.float64, torch.int64) for tensor in tensors)
    dtype = torch.float64 if double else torch.float32
    runs = [list(run) for _, run in groupby(tensors, key=lambda tensor: (tensor.device, tensor.dtype))]
    with torch.no_grad():
        joined = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
        return torch.cat([one.to(device, dtype, non_blocking=True) for one in joined])


def _meeting_place(tensors: Sequence[Tensor]) -> torch.device:
    """The first device that is not the CPU: a copy to the CPU that nobody waits for would be read half-written."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
