"""Forward passes of a custom loop, kept so that a spike of the gradient can be localised by repeating them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlwatch.error_boundary import call_or, described
from rlwatch.gradloc.passes import LossPass, Outputs, RandomState, RecordedPasses, Undivided
from rlwatch.gradloc.rerun import out_of_memory
from rlwatch.tensors.padded import places_of
from rlwatch.tensors.tokens import TokenBatch

# Arguments of a loop's own forward pass, restricted to some of its sequences.


DEEP = 4
"""Number of levels of lists, mappings and objects within each other that are searched."""


class Cut:
    """Function object that restricts values with one entry for each of ``count`` sequences to the sequences ``rows``.

    Tensors and arrays are restricted in the first dimension with ``count`` entries, lists in theirs. Nested tensors,
    tensor dictionaries, mappings, tuples and plain objects are copied with their contents restricted. A function is
    created anew with the variables that it closes over (and its defaults) restricted. Parameters, modules and other
    values are unchanged. Originals are not modified. The caller must check the result of the function, because another
    dimension may have the same size by chance. :attr:`changed` is True once a value was restricted.
    """

    def __init__(self, count: int, rows: Sequence[int]) -> None:
        self.changed = False
        self._count = count
        self._rows = list(rows)

    def __call__(self, value: Any, deep: int = DEEP) -> Any:
        """Return ``value`` restricted to the sequences; ``deep`` is the number of levels to search."""
        cut = self._array(value) if isinstance(value, Tensor | np.ndarray) else self._holder(value, deep)
        self.changed |= cut is not value
        return cut

    def function(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute`` with the variables that it closes over restricted to the sequences."""
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
        """Cut an object with plain attributes; an object with a finaliser is not copied."""
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


# The forward passes of a custom loop, kept so that a spike of the gradient can be localised.


NOT_RUN = "its log-probs do not come out of Watcher.forward()"
NO_GRAPH = "the log-probs that were observed carry no gradient"
STRANGE = "it is not what forward() returned, so its gradient cannot be localised"


Pick = Callable[..., Any]
"""The loop's own function (rows, *arguments of the forward pass) -> a tuple of its arguments for those sequences
only.
"""


@dataclass(frozen=True, slots=True)
class LoopCall:
    """One call of the loop's forward pass, with what is needed to repeat it.

    ``logp`` and ``entropy`` are the indices of log-probs and entropies in its result. ``shape`` (B, T) is the padded
    shape of the log-probs. ``pick`` is the loop's own function that restricts the arguments to some sequences.
    """

    compute: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    pick: Pick | None = None
    logp: int = 0
    entropy: int | None = None
    shape: tuple[int, int] = (1, 0)

    def again(self, rows: Sequence[int] | None = None) -> Outputs:
        """Repeat the call for the sequences ``rows`` (None: all), and return its outputs.

        Raises
        ------
        Undivided
            If the arguments cannot be restricted to single sequences, or the call fails with restricted arguments.
        """
        if rows is None or self.shape[0] == 1:
            return self._outputs(self.compute(*self.args, **self.kwargs))

        def failed(error: Exception) -> Outputs:
            if isinstance(error, Undivided) or out_of_memory(error):
                raise error
            raise Undivided(f"the forward of one sequence failed: {described(error)}") from None

        return call_or(lambda: self._outputs(self._of(rows)), failed)

    def _of(self, rows: Sequence[int]) -> Any:
        if self.pick is not None:
            picked = self.pick(list(rows), *self.args, **self.kwargs)
            if not isinstance(picked, tuple):
                raise Undivided("what rows= returned is no tuple of arguments")
            return self.compute(*picked)
        cut = Cut(self.shape[0], rows)
        compute, args = cut.function(self.compute), [cut(each) for each in self.args]
        kwargs = {name: cut(each) for name, each in self.kwargs.items()}
        if not cut.changed:
            raise Undivided("no argument of the forward has one row for each sequence; Watcher(rows=) can say how")
        return compute(*args, **kwargs)

    def _outputs(self, result: Any) -> Outputs:
        width = self.shape[1]
        entropy = None if self.entropy is None else _padded(_part(result, self.entropy), width)
        return Outputs(_padded(_part(result, self.logp), width), entropy)


@dataclass(slots=True)
class Ran:
    """The last forward pass: its call, its result (with the graph, so kept briefly), and the random states before it.

    ``drew`` is True if it drew random numbers.
    """

    call: LoopCall
    result: Any
    random: RandomState
    drew: bool


class SequenceOrigin:
    """Origin of the sequences of a step in a generation: prompt, group, sample, task and reward of each."""

    def __init__(self) -> None:
        self._generation: Mapping[str, Any] = {}
        self._first, self._count = 0, 0
        self._observed: list[tuple[LossPass, Any, Any]] = []

    def generated(self, inputs: Mapping[str, Any]) -> None:
        """Keep the inputs of a generation, as passed to ``Watcher.rollouts``; they are only read for a spike."""
        self._first += self._count
        self._generation = inputs
        sizes = (
            len(value) for name in COLUMNS if (value := inputs.get(name)) is not None and hasattr(value, "__len__")
        )
        self._count = next(sizes, 0)

    def observed(self, one: LossPass, inputs: Mapping[str, Any]) -> None:
        """Keep the micro-batch ``one`` with the indices of its responses in the generation, if the loop gave them in
        ``inputs``.
        """
        self._observed.append((one, inputs.get("responses"), inputs.get("ids")))

    def forget(self) -> None:
        """Drop the kept micro-batches at the end of a step."""
        self._observed.clear()

    def identify(self, passes: Sequence[LossPass]) -> None:
        """Set the origin and the reward of each sequence of ``passes``. Waits for the device."""
        columns = self._columns()
        for one, responses, ids in self._observed:
            places = _counted(responses) if responses is not None else _found(ids, self._generation.get("ids"))
            if places is None or not any(one is each for each in passes) or len(places) != one.shape[0]:
                continue
            picked = {n: [v[i] if 0 <= i < len(v) else None for i in places] for n, v in columns.items()}
            rewards = picked.pop("reward", None)
            if rewards is not None:
                numbers = [nan if value is None else float(value) for value in rewards]
                one.rewards = torch.tensor(numbers, device=one.tokens.logp.device)
            one.identify(picked)

    def _columns(self) -> dict[str, list[Any]]:
        given = {ours: self._generation.get(name) for name, ours in COLUMNS.items()}
        found = {name: _counted(values) for name, values in given.items() if values is not None}
        columns: dict[str, list[Any]] = {name: list(values) for name, values in found.items() if values is not None}
        parts = self._generation.get("reward_parts")
        by_function = {
            str(name): _counted(values) for name, values in (parts if isinstance(parts, Mapping) else {}).items()
        }
        if by_function:
            columns["reward_parts"] = [
                json.dumps(
                    {name: values[i] for name, values in by_function.items() if values is not None and i < len(values)}
                )
                for i in range(self._count)
            ]
        columns["rollout"] = [self._first + i for i in range(self._count)]
        groups = self._generation.get("groups")
        names = (
            [i // groups for i in range(self._count)] if isinstance(groups, int) and groups > 0 else _counted(groups)
        )
        if names:
            columns["group"] = [str(name) for name in names]
            columns["sample"] = [names[:i].count(name) for i, name in enumerate(names)]
        return columns


COLUMNS = {"rewards": "reward", "tasks": "task", "prompts": "prompt", "prompt_index": "prompt_index"}
"""Input of ``Watcher.rollouts`` with one entry for each response -> column of a reported token."""


def _counted(values: Any) -> list[Any] | None:
    """Return a list of plain values, or None if ``values`` is not one."""
    if values is None or isinstance(values, str | int):
        return None
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _found(ids: Any, known: Any) -> list[int] | None:
    """Return the index in ``known`` of each row of ``ids``, -1 for none; None if they cannot be compared."""
    both = (ids, known)
    if not all(isinstance(x, Tensor) and not x.is_nested and x.dim() == 2 for x in both):
        return None
    places = places_of([ids], [known.to(ids.device)])
    return None if places is None else places.tolist()


@dataclass(slots=True)
class LossPasses:
    """Matcher of the results of ``Watcher.forward`` to the inputs of ``Watcher.observe``.

    It keeps matched passes in ``passes``. ``missing`` is the reason why the last pass was not kept.
    """

    passes: RecordedPasses
    missing: str = ""
    origin: SequenceOrigin = field(default_factory=SequenceOrigin)
    _ran: Ran | None = field(default=None, init=False)

    def ran(self, call: LoopCall, result: Any, before: RandomState) -> None:
        """Keep the ``result`` of a forward pass, and the ``call`` by which it can be repeated; ``before`` are the
        random states before it.
        """
        self._ran = Ran(call, result, before, not before.same(RandomState.now()))

    def observed(self, inputs: Mapping[str, Any], tokens: TokenBatch) -> dict[str, str]:
        """Match the last forward pass to the observed log-probs, before their backward pass.

        ``inputs`` are those of ``Watcher.observe``, ``tokens`` the batch made of them. Returns invalid inputs with the
        reasons.
        """
        ran, self._ran = self._ran, None
        logp, entropy = inputs.get("logp"), inputs.get("entropy")
        if ran is None or not _carries_gradient(logp):
            self.missing = NOT_RUN if ran is None else NO_GRAPH
            return {}
        at, second = _place(logp, ran.result), _place(entropy, ran.result)
        rows, width = tokens.logp.shape
        if at is None:
            self.missing = STRANGE
            return {"logp": STRANGE}
        call = replace(ran.call, logp=at, entropy=second, shape=(int(rows), int(width)))
        parts = {"logp": logp} | ({} if second is None else {"entropy": entropy})
        whole = {name: part for name, part in parts.items() if isinstance(part, Tensor) and not part.is_nested}
        outputs = Outputs(**{"logp": tokens.logp, **whole})
        one = self.passes.add(call.again, outputs, tokens, random=ran.random, drew=ran.drew, divides=None)
        self.origin.observed(one, inputs)
        for name in parts.keys() - whole.keys():
            self._hook_rows(one, name, parts[name])
        return {}

    def forget(self) -> None:
        """Drop the kept forward passes of the loss at the end of a step."""
        self._ran, self.missing = None, ""
        self.origin.forget()
        self.passes.clear()

    def _hook_rows(self, one: LossPass, name: str, part: Any) -> None:
        """Read the coefficients of rows of unequal length: a nested tensor has one gradient, a list one for each."""
        for place, each in enumerate([part] if isinstance(part, Tensor) else part):
            if each.requires_grad:
                each.register_hook(self.passes.contained(_Rows(one, name, place)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Adds the gradient of row ``place``, or of all rows of a nested tensor, to the coefficients."""

    one: LossPass
    name: str
    place: int

    def __call__(self, gradient: Tensor) -> None:
        coefficient = self.one.coefficients.setdefault(self.name, torch.zeros_like(self.one.tokens.logp))
        gradient = gradient.detach()
        rows = enumerate(gradient.unbind()) if gradient.is_nested else [(self.place, gradient)]
        for i, row in rows:
            coefficient[i, : len(row)] += row


def _carries_gradient(logp: Any) -> bool:
    rows = logp if isinstance(logp, tuple | list) else [logp]
    return any(isinstance(row, Tensor) and row.requires_grad for row in rows)


def _padded(part: Any, width: int) -> Tensor:
    """Return (B, at least ``width``) with the graph; rows of unequal length are filled with zeros."""
    if isinstance(part, Tensor) and not part.is_nested:
        return part
    rows = part.unbind() if isinstance(part, Tensor) else part
    return torch.stack([pad(row, (0, max(0, width - len(row)))) for row in rows])


ALL = -1
"""Index that means the whole result of a function."""


def _part(result: Any, place: int) -> Any:
    return result if place == ALL else result[place]


def _place(wanted: Any, result: Any) -> int | None:
    """Return the index of the object ``wanted`` in the result of a function."""
    if wanted is None or wanted is result:
        return None if wanted is None else ALL
    parts = result if isinstance(result, tuple | list) else ()
    return next((i for i, part in enumerate(parts) if part is wanted), None)
