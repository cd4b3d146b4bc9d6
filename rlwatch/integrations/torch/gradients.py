"""Gradients per layer, with the loss scale of float16 taken out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.mergeable import Stats


def read_gradients(model: nn.Module, optimizer: Any = None, scaler: Any = None, *, rank: int = 0) -> Stats:
    """Norms of the gradients ``model`` holds now, as far as they count on this ``rank``; empty if it holds none.

    ``scaler`` is the loop's ``torch.amp.GradScaler``, before or after ``unscale_``: either way what is reported is
    without its scale, and an overflow (how it finds its scale) is a skipped step, not a measurement. Of gradients
    that are both scaled and sharded nothing is reported: no rank sees whether there was an overflow.
    """
    norms = grad_norms(model.named_parameters(), rank=rank)
    if norms is None:
        return {}
    if scaler is None or not scaler.is_enabled():
        return norms.stats()
    if not norms.whole:
        return {}
    scale = _scale_left(scaler, optimizer)
    return norms.unscaled_stats(norms.total if scale is None else norms.total / scale)


def _scale_left(scaler: Any, optimizer: Any) -> Tensor | None:
    """The factor the gradients still carry, on the device; None once ``unscale_`` has taken it out."""
    state = scaler._per_optimizer_states.get(id(optimizer))  # noqa: SLF001  (asking it would wait for the device)
    stage = getattr(state["stage"], "name", "READY") if state else "READY"
    return scaler._get_scale_async() if stage == "READY" else None  # noqa: SLF001


def scales(optimizer: Any, scaler: Any) -> tuple[float | None, float]:
    """The loss scale, which coefficients carry, and what the gradients still carry of it; waits for the device.

    (None, 1) without an enabled ``scaler``.
    """
    if scaler is None or not scaler.is_enabled():
        return None, 1.0
    scale = float(scaler.get_scale())
    return scale, 1.0 if _scale_left(scaler, optimizer) is None else scale
