"""Random number generators of the accelerator in use, whichever it is: CUDA, XPU, MPS, or one that a plugin brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def accelerator() -> Any:
    """Module of the accelerator that this process uses (``torch.cuda``, ``torch.xpu``...); None while it uses none."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else getattr(torch, device.type, None)
    if module is None or not hasattr(module, "get_rng_state") or not module.is_available():
        return None
    return module if getattr(module, "is_initialized", lambda: True)() else None


def device_states() -> tuple[Tensor, ...]:
    """States of its generators, one a device. They lie on the CPU, nothing is waited for."""
    module = accelerator()
    if module is None:
        return ()
    every = getattr(module, "get_rng_state_all", None)
    return (module.get_rng_state(),) if every is None else tuple(every())


def set_device_states(states: Sequence[Tensor]) -> None:
    """Make them so again."""
    module = accelerator()
    if module is None or not states:
        return
    every = getattr(module, "set_rng_state_all", None)
    if every is None:
        module.set_rng_state(states[0])
    else:
        every(list(states))


def place_of(like: Tensor) -> int:
    """Place of its device's generator among :func:`device_states`; -1 where it draws from the CPU's."""
    module = accelerator()
    if module is None or getattr(torch, like.device.type, None) is not module:
        return -1
    return (like.device.index or 0) if hasattr(module, "get_rng_state_all") else 0


def state_of(like: Tensor) -> Tensor:
    """State of the generator that draws for the device of ``like``."""
    place = place_of(like)
    return torch.get_rng_state() if place < 0 else device_states()[place]


def set_state_of(like: Tensor, state: Tensor) -> None:
    """Make it so again, and leave those of other devices as they are."""
    place = place_of(like)
    if place < 0:
        torch.set_rng_state(state)
        return
    states = list(device_states())
    states[place] = state
    set_device_states(states)
