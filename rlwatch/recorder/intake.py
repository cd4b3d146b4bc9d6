"""Taking metrics from the training thread: copy now, convert later.

The training thread pays for one dict copy. 0-d tensors are stacked into one new tensor and, on an
accelerator, copied to pinned memory without waiting; the writer thread reads the numbers. So logging
never synchronises a device, and a tensor may be overwritten right after the call.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlwatch.recorder.counters import Counters

if TYPE_CHECKING:
    import torch

_PLAIN = frozenset({float, int})


@dataclass(slots=True)
class Deferred:
    """Names and the stacked values (N,) of tensors on their way to the host."""

    names: list[str]
    values: torch.Tensor
    ready: Any = None  # a CUDA event, or None when the values are on the host already

    def floats(self) -> list[float]:
        """The values, waiting for the copy if need be; called on the writer thread only."""
        if self.ready is not None:
            self.ready.synchronize()
        result: list[float] = self.values.tolist()
        return result


@dataclass(slots=True)
class Entry:
    """One ``run.log`` call as it lies in the queue."""

    step: int
    metrics: dict[str, Any]
    ts: float
    deferred: list[Deferred] = field(default_factory=list, init=False)


def admit(metrics: Mapping[str, Any], step: int, ts: float) -> Entry:
    """Copy what the caller gave; tensors are snapshotted, nothing is converted or checked yet."""
    entry = Entry(step, dict(metrics), ts)
    if not _PLAIN.issuperset(map(type, entry.metrics.values())):  # the loop runs in C: this is the hot path
        _defer(entry, [name for name, value in entry.metrics.items() if hasattr(value, "detach")])
    return entry


def step_index(step: Any) -> int:
    """``step`` as an int >= 0. Raises ``ValueError`` saying what it got otherwise."""
    if type(step) is int and step >= 0:
        return step
    if isinstance(step, bool):
        raise ValueError(f"step must be an integer >= 0, got {step!r}")
    try:
        index = operator.index(step)
    except TypeError:
        raise ValueError(f"step must be an integer >= 0, got {step!r}") from None
    if index < 0:
        raise ValueError(f"step must be an integer >= 0, got {index}")
    return index


def numbers(entry: Entry, counters: Counters) -> dict[str, float]:
    """The entry's metrics as floats; what is not one number is left out, counted and warned of once.

    ``None`` means not measured and is left out silently.
    """
    out: dict[str, float] = {}
    for name, value in entry.metrics.items():
        if value is None:
            continue
        try:
            out[str(name)] = value if type(value) is float else _number(value)
        except (TypeError, ValueError, OverflowError):
            counters.warn("bad_values", f"metric {name!r} is not a number: got {value!r:.80}; it was left out")
    for deferred in entry.deferred:
        out.update(zip(deferred.names, deferred.floats(), strict=True))
    return out


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("text is not a number")
    return float(value)


def _defer(entry: Entry, names: list[str]) -> None:
    """Move the tensors called ``names`` from the entry's metrics into one deferred stack per device."""
    if not names:
        return
    import torch

    by_device: dict[torch.device, list[str]] = {}
    for name in names:
        tensor = entry.metrics[name]
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
            by_device.setdefault(tensor.device, []).append(name)
    for device, group in by_device.items():
        dtype = torch.float32 if device.type == "mps" else torch.float64
        stack = torch.stack([entry.metrics.pop(name).detach().reshape(()).to(dtype) for name in group])
        entry.deferred.append(_to_host(group, stack))


def _to_host(names: list[str], stack: torch.Tensor) -> Deferred:
    import torch

    if stack.device.type != "cuda":
        return Deferred(names, stack)
    host = torch.empty(stack.shape, dtype=stack.dtype, pin_memory=True)
    host.copy_(stack, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(stack.device))
    return Deferred(names, host, ready)
