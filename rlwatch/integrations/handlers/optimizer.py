"""Starting an optimizer anew without making a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.unwrapping import inner_optimizer


def clearable(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The torch optimizers inside ``optimizers``. Raises ``RLWatchError`` if one is missing or not torch's.

    Others (DeepSpeed's) keep state in partitions of their own, which forgetting a dictionary would not clear.
    """
    inner = [inner_optimizer(optimizer) for optimizer in optimizers]
    if not inner:
        raise RLWatchError("there is no optimizer to clear; send optimizer=keep to reset the reference alone")
    for optimizer in inner:
        if not isinstance(optimizer, Optimizer):
            raise RLWatchError(
                f"the state of a {type(optimizer).__module__}.{type(optimizer).__name__} cannot be cleared; "
                "send optimizer=keep to reset the reference alone"
            )
    return inner


def clear_state(optimizers: Iterable[Any]) -> int:
    """Forget the moments and step counts of every parameter; returns how many had any.

    The next step begins as a new optimizer would. Learning rates and other settings stay.
    """
    count = 0
    for optimizer in clearable(optimizers):
        count += len(optimizer.state)
        optimizer.state.clear()
    return count
