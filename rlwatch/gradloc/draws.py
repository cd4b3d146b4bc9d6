"""Random numbers that a forward pass drew (dropout), given to a pass of some of its sequences alone.

A sequence that runs alone would draw others: the generator is further on, and a kernel draws for a whole tensor at
once. So the micro-batch runs once without a graph, and what its kernels drew is kept, the truth values as such: a byte
for each element that dropout looks at, of which training kept four and more. A sequence alone is then given its own.
The generator's state tells which draw is which, so recomputed activations (gradient checkpointing) get theirs as well.

Kernels that draw inside themselves (fused attention with dropout) show nobody what they drew: then, and wherever a
shape does not tell the sequences apart, :class:`Undivided` is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rlwatch.gradloc.generators import device_states, place_of, set_state_of, state_of
from rlwatch.gradloc.passes import LossPass, Undivided

PLAIN = (
    "bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_", "exponential", "exponential_", "geometric_",
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random_", "randperm", "native_dropout",
)  # fmt: skip
"""Operations whose numbers depend on nothing but the generator, their arguments apart."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Numbers that one operation drew, and the generator afterwards."""

    values: Tensor
    after: Tensor


class Draws:
    """Numbers that the forward of a micro-batch of ``count`` sequences draws: kept by :meth:`of`.

    The generators must be as they were when the forward began whenever a pass of some sequences begins.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: dict[tuple[Any, bytes], Draw] = {}

    @classmethod
    def of(cls, one: LossPass) -> Draws:
        """Run the whole forward again and keep what it draws. Changes the state of the generators.

        Raises
        ------
        Undivided
            A kernel draws that shows nobody what it drew.
        """
        draws = cls(one.shape[0])
        one.random.restore()
        with torch.no_grad(), _Kept(draws):
            one.forward()
        return draws

    def given_to(self, rows: Sequence[int]) -> TorchDispatchMode:
        """Operations inside get the numbers of these sequences; the backward belongs inside as well.

        What does not fit raises :class:`Undivided` there.
        """
        return _Given(self, rows)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that may draw random numbers."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Kept(_Drawing):  # type: ignore[no-untyped-call]
    @override
    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = _states()
        result = func(*args, **kwargs)
        drawn = _mask_of(func, result)
        if drawn is None:
            return result
        state = _state(drawn)
        if _of(before, drawn) == state:
            return result
        if _name(func) not in PLAIN:
            raise Undivided(f"{_name(func)} draws random numbers that it does not show")
        kept = drawn.bool() if _truths(func) else drawn.clone()
        self._draws.kept[func, _of(before, drawn)] = Draw(kept, state_of(drawn))
        return result


class _Given(_Drawing):  # type: ignore[no-untyped-call]
    def __init__(self, draws: Draws, rows: Sequence[int]) -> None:
        super().__init__(draws)
        self._rows = rows

    @override
    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = _states()
        result = func(*args, **kwargs)  # of the few sequences: for its shape
        own = _mask_of(func, result)
        if own is None:
            return result
        draw = self._draws.kept.get((func, _of(before, own)))
        if draw is None:
            if _of(before, own) != _state(own):
                raise Undivided(f"alone it draws random numbers ({_name(func)}) that it did not draw before")
            return result
        set_state_of(own, draw.after)
        values = _of_rows(draw.values, own.shape, self._rows, self._draws.count).to(own.dtype)
        if _name(func) == "native_dropout":
            scale = 0.0 if args[1] == 1 else 1.0 / (1.0 - args[1])
            return args[0] * values * scale, values
        return own.copy_(values)


def _of_rows(values: Tensor, shape: torch.Size, rows: Sequence[int], count: int) -> Tensor:
    """Those of ``values`` that belong to ``rows``, of ``count``, so that they have ``shape``."""
    if values.shape == shape:
        return values
    apart = [d for d, (a, b) in enumerate(zip(values.shape, shape, strict=False)) if a != b]
    if values.dim() == len(shape) and len(apart) == 1:
        (d,) = apart
        each, left = divmod(values.shape[d], count)
        if not left and shape[d] == each * len(rows):
            index = torch.as_tensor(rows, device=values.device)
            apart_by_row = values.reshape(*values.shape[:d], count, each, *values.shape[d + 1 :])
            return apart_by_row.index_select(d, index).reshape(shape)
    raise Undivided(f"random numbers of shape {tuple(values.shape)} do not tell sequences apart")


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def _truths(func: Any) -> bool:
    """True where 0 and 1 are drawn."""
    return "bernoulli" in _name(func) or _name(func) == "native_dropout"


def _mask_of(func: Any, result: Any) -> Tensor | None:
    """The tensor that was drawn: of fused dropout its mask. None of what is asked about kernels."""
    parts = result if isinstance(result, tuple | list) else (result,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return tensors[-1 if _name(func) == "native_dropout" else 0] if tensors else None


def _state(like: Tensor) -> bytes:
    return state_of(like).numpy().tobytes()


def _states() -> list[bytes]:
    """Of the accelerator's generators, one a device, and of the CPU's, which is the last."""
    return [state.numpy().tobytes() for state in (*device_states(), torch.get_rng_state())]


def _of(states: Sequence[bytes], like: Tensor) -> bytes:
    return states[place_of(like)]
