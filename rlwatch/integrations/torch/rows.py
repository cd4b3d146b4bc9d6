"""Arguments of a loop's own forward, cut to some of its sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEEP = 4
"""Levels of lists, mappings and objects within each other that are looked through."""


class Cut:
    """Cuts whatever holds one entry for each of ``count`` sequences to ``rows``; :attr:`changed` says if it ever did.

    Tensors and arrays are cut in the first dimension if that has ``count`` entries, else in the first that has; lists
    in theirs. Nested tensors, tensor dictionaries, mappings, tuples and plain objects are copied with what they hold
    cut. A function is made anew with the variables it closes over (and its defaults) cut. Parameters, modules and all
    else stay what they are. No original is written to. That this is what the function means by a sequence is to be
    checked by what it returns.
    """

    def __init__(self, count: int, rows: Sequence[int]) -> None:
        self.changed = False
        self._count = count
        self._rows = list(rows)

    def __call__(self, value: Any, deep: int = DEEP) -> Any:
        """``value`` cut."""
        cut = self._array(value) if isinstance(value, Tensor | np.ndarray) else self._holder(value, deep)
        self.changed |= cut is not value
        return cut

    def function(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """``compute`` with what it closes over cut."""
        if isinstance(compute, partial):
            inner = self.function(compute.func)
            return partial(inner, *map(self, compute.args), **{n: self(v) for n, v in compute.keywords.items()})
        if not isinstance(compute, FunctionType):
            return compute
        made = FunctionType(
            compute.__code__,
            compute.__globals__,
            compute.__name__,
            None if compute.__defaults__ is None else tuple(map(self, compute.__defaults__)),
            None if compute.__closure__ is None else tuple(map(self._cell, compute.__closure__)),
        )
        made.__kwdefaults__ = {name: self(value) for name, value in (compute.__kwdefaults__ or {}).items()}
        return made

    def _cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # not bound yet
            return cell
        cut = self(content)
        return cell if cut is content else CellType(cut)

    def _array(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor) and value.is_nested:
            if value.size(0) != self._count:
                return value
            each = value.unbind()
            return torch.nested.as_nested_tensor([each[i] for i in self._rows], layout=value.layout)
        for dim, size in enumerate(value.shape):
            if size == self._count:
                return value[(slice(None),) * dim + (self._rows,)]
        return value

    def _holder(self, value: Any, deep: int) -> Any:
        if deep == 0 or isinstance(value, nn.Module | str | bytes | type):
            return value
        if type(value).__name__ == "TensorDict" and len(value) and value.batch_size[:1] == (self._count,):
            return value[self._rows]
        if isinstance(value, tuple | list):
            return self._sequence(value, deep)
        if isinstance(value, Mapping):
            return self._parts(value, dict(value), lambda made, name, part: made.__setitem__(name, part), deep)
        return self._object(value, deep)

    def _object(self, value: Any, deep: int) -> Any:
        """An object of plain attributes; one that lets go of something when it ends has no copies."""
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict) or callable(value) or hasattr(type(value), "__del__"):
            return value
        return self._parts(value, held, object.__setattr__, deep)

    def _sequence(self, value: Any, deep: int) -> Any:
        inside = [self(part, deep - 1) for part in value]
        if all(a is b for a, b in zip(inside, value, strict=True)):
            if len(value) != self._count or hasattr(value, "_fields"):
                return value
            inside = [value[i] for i in self._rows]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)

    def _parts(self, value: Any, held: Mapping[Any, Any], put: Callable[[Any, Any, Any], None], deep: int) -> Any:
        cut = {name: new for name, part in held.items() if (new := self(part, deep - 1)) is not part}
        if not cut:
            return value
        made = copy.copy(value)
        for name, part in cut.items():
            put(made, name, part)
        return made
