"""Taking metrics from the training thread: copy now, convert later.

The training thread pays for one dict copy. 0-d tensors set out for the host together, and nobody waits
for them; the writer thread reads the numbers. So logging never synchronises a device, and a tensor may be
overwritten right after the call.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlwatch.recorder.counters import Counters

if TYPE_CHECKING:
    from rlwatch.tensors.transfer import Transfer

_PLAIN, _TEXT = frozenset({float, int, bool}), frozenset({str})


@dataclass(slots=True)
class Entry:
    """One ``run.log`` call as it lies in the queue."""

    step: int
    metrics: dict[str, Any]
    ts: float
    deferred: list[tuple[list[str], Transfer]] = field(default_factory=list, init=False)
    number: int = field(default=0, init=False)
    """Under which the run's journal has it, or the part of it that was plain numbers at once; 0: not there."""


def admit(metrics: Mapping[str, Any], step: int, ts: float) -> Entry:
    """Copy what the caller gave; tensors are snapshotted, nothing is converted or checked yet."""
    entry = Entry(step, dict(metrics), ts)
    if not _PLAIN.issuperset(map(type, entry.metrics.values())):  # the loop runs in C: this is the hot path
        _defer(entry, [name for name, value in entry.metrics.items() if _in_memory(value)])
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


def plain_numbers(entry: Entry) -> tuple[dict[str, float], bool]:
    """What of the entry is known to be a number without running anybody's code or waiting for a device, and whether
    that is all of it.
    """
    metrics = entry.metrics
    if not entry.deferred and _PLAIN.issuperset(map(type, metrics.values())) and _TEXT.issuperset(map(type, metrics)):
        return metrics, True
    plain: dict[str, float] = {}
    whole = True
    numpy = sys.modules.get("numpy")  # where nobody imported it, nothing is of it
    scalars = () if numpy is None else (numpy.floating, numpy.integer, numpy.bool_)
    for name, value in metrics.items():
        if type(name) is str and (type(value) in _PLAIN or isinstance(value, scalars)):
            plain[name] = float(value)
        elif value is not None:
            whole = False
    for names, transfer in entry.deferred:
        if transfer.ready() and _TEXT.issuperset(map(type, names)):
            plain.update(zip(names, map(float, transfer.read()), strict=True))
        else:
            whole = False
    return plain, whole


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
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
            counters.warn("bad_values", f"metric {name!r} is not a number: got {_shown(value)}; it was left out")
    for names, transfer in entry.deferred:
        out.update(zip(names, map(float, transfer.read()), strict=True))
    return out


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("text is not a number")
    if _in_parts(value):  # reading it is a collective, which this rank alone must not begin
        raise TypeError("parts are not a number")
    if _complex(value):  # its imaginary part would be dropped in silence
        raise TypeError("a complex number is not a metric")
    return float(value)


def _in_parts(value: Any) -> bool:
    """Whether it is a DTensor, of which other ranks hold other parts."""
    return hasattr(value, "full_tensor")


def _in_memory(value: Any) -> bool:
    """Whether it is a tensor that holds one real number; whatever else it may be, the writer thread judges."""
    if not (hasattr(value, "detach") and hasattr(value, "numel")) or _in_parts(value) or value.numel() != 1:
        return False
    return not (_complex(value) or value.is_sparse or value.is_meta)


def _complex(value: Any) -> bool:
    """Whether it is a complex number of numpy or torch."""
    kind = getattr(value, "dtype", None)
    return getattr(kind, "kind", "") == "c" or getattr(kind, "is_complex", False) is True


def _shown(value: Any) -> str:
    return "a DTensor (pass its full_tensor(), on every rank)" if _in_parts(value) else f"{value!r:.80}"


def _defer(entry: Entry, names: list[str]) -> None:
    """Move the tensors called ``names`` out of the entry's metrics, one transfer a device."""
    by_device: dict[object, list[str]] = {}
    for name in names:
        by_device.setdefault(entry.metrics[name].device, []).append(name)
    for group in by_device.values():
        from rlwatch.tensors.transfer import Transfer

        entry.deferred.append((group, Transfer([entry.metrics.pop(name).reshape(()) for name in group])))
