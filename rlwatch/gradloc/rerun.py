"""Repetition of forward passes of a model in training, after which everything is as before.

A pass of some sequences alone gets the random numbers (dropout) that the whole pass drew.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from rlwatch.error_boundary import call_or, described
from rlwatch.gradloc.distributed import sharded_modules, unsynchronised
from rlwatch.gradloc.passes import LossPass, RandomState, Undivided, device_states, place_of, set_state_of, state_of


@contextmanager
def rerunning(model: nn.Module, *, wide: bool = True) -> Iterator[Precision]:
    """Let forward passes in the ``with`` block run without gradient graph and leave no trace, also if they fail.

    If ``wide`` they run in float32, else in the precision of training. Random state, modes, autocast, configuration and
    hooks are restored afterwards. Buffers are never written: modules see copies of them. Parameters are those of
    training unless :mod:`rlwatch.gradloc.direction` replaces them. State that a module keeps in plain attributes, and
    threads that a forward pass starts, are not covered.
    """
    random = RandomState.now()
    modes = [(module, module.training) for module in model.modules()]
    precision = Precision(wide)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_autocast(precision))
            stack.enter_context(float32_kernels(model))
            if wide and not sharded_modules(model):  # FSDP2 casts what it gathers, and must go on so
                stack.enter_context(WithoutNarrowing(precision))
            stack.enter_context(_copied_buffers(model, precision))
            stack.enter_context(unsynchronised())
            yield precision
    finally:
        for module, mode in modes:
            module.training = mode
        random.restore()


class BatchCopies(dict[str, Any]):
    """Buffers of a module, each of which is copied when it is first read, in the requested precision.

    The copy is kept.
    """

    def __init__(self, true: dict[str, Any], precision: Precision) -> None:
        super().__init__(true)
        self._precision = precision
        self._untouched = set(true)

    @override
    def __getitem__(self, name: str) -> Any:
        buffer = super().__getitem__(name)
        if name in self._untouched and isinstance(buffer, Tensor):
            self._untouched.discard(name)
            buffer = self._precision.widen(buffer.clone())
            super().__setitem__(name, buffer)
        return buffer

    @override
    def __setitem__(self, name: str, buffer: Any) -> None:
        self._untouched.discard(name)
        super().__setitem__(name, buffer)


@contextmanager
def _copied_buffers(model: nn.Module, precision: Precision) -> Iterator[None]:
    true = [(module, module._buffers) for module in model.modules()]  # noqa: SLF001
    try:
        for module, buffers in true:
            module.__dict__["_buffers"] = BatchCopies(buffers, precision)
        yield
    finally:
        for module, buffers in true:
            module.__dict__["_buffers"] = buffers


# Forward passes in float32, whatever the precision of training; or in training's precision, which is noted.

LOW = (torch.bfloat16, torch.float16)
NARROW = (torch.Tensor.bfloat16, torch.Tensor.half)


@dataclass(slots=True)
class Precision:
    """Precision in which repeated forward passes compute.

    ``wide``: in float32 if training uses less, else as training does. ``low`` becomes True if training was seen to use
    less than float32, for weights, by autocast or by FSDP's policy.
    """

    wide: bool = True
    low: bool = False

    def widen(self, value: Tensor) -> Tensor:
        """Return ``value`` detached, and in float32 if ``wide`` and it has lower precision.

        Lower precision is noted in ``low``.
        """
        if value.dtype not in LOW:
            return value.detach()
        self.low = True
        return value.detach().float() if self.wide else value.detach()


@contextmanager
def without_autocast(precision: Precision) -> Iterator[None]:
    """Disable autocast on this thread if ``precision`` is wide, even if a forward pass switches it on itself.

    Trainers do: accelerate wraps ``model.forward``, TRL calls ``accelerator.autocast()``, loops write
    ``torch.autocast``. All of them end in ``torch.autocast.__enter__``. Other threads are not affected.
    """
    enter, here = torch.autocast.__enter__, threading.get_ident()

    def enter_disabled(self: torch.autocast) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]
        if threading.get_ident() == here and torch.is_autocast_enabled(self.device):
            precision.low = True
            torch.set_autocast_enabled(self.device, not precision.wide)
        return entered

    with _all_off(precision):
        torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class WithoutNarrowing(TorchFunctionMode):
    """Mode in which casts to bfloat16 or float16 that a forward pass makes itself are casts to float32.

    A value that is rounded to 8 bits on its way loses the small differences that are measured.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._precision = precision

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NARROW:
            func = torch.Tensor.float
        elif func is torch.Tensor.to and any(
            isinstance(a, torch.dtype) and a in LOW for a in (*args, *kwargs.values())
        ):
            args = tuple(self._wide(value) for value in args)
            kwargs = {name: self._wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in LOW:
            self._precision.low = True
            return torch.float32
        return value


@contextmanager
def _all_off(precision: Precision) -> Iterator[None]:
    """Leave the autocast that the caller is in."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([] if accelerator is None else [accelerator.type])]
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    precision.low |= bool(on)
    for device in on:
        torch.set_autocast_enabled(device, not precision.wide)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


# Kernels that a float32 forward pass, or its forward derivative, can run through.

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def routed(model: nn.Module) -> bool:
    """Return True if the model's configuration has experts to which tokens are routed."""
    counts = [getattr(config, name, None) for config in _configs(model) for name in EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


@contextmanager
def float32_kernels(model: nn.Module) -> Iterator[None]:
    """Run without compiled code, flash attention and grouped experts in the ``with`` block.

    Compiled code reads weights without regard to :mod:`rlwatch.gradloc.direction`; the other two do not accept float32.
    Configurations of transformers' models are changed temporarily.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for config in _configs(model):
            if "flash" in str(getattr(config, ATTENTION, None)):
                stack.enter_context(_set(config, ATTENTION, "sdpa"))
            if getattr(config, EXPERTS, None) is not None:
                stack.enter_context(_set(config, EXPERTS, "eager"))
        yield


@contextmanager
def differentiable_kernels(model: nn.Module) -> Iterator[None]:
    """Use attention that has a forward derivative in the ``with`` block: plain matrix products, or written out in
    Python.
    """
    with ExitStack() as stack:
        for config in _configs(model):
            if getattr(config, ATTENTION, None) not in (None, "sdpa", "eager"):
                stack.enter_context(_set(config, ATTENTION, "eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextmanager
def _set(config: Any, name: str, value: str) -> Iterator[None]:
    """Set a value of this configuration alone: transformers' own setter changes others, and cannot restore them."""
    name = f"{name}_internal" if f"{name}_internal" in vars(config) else name
    before = getattr(config, name)
    object.__setattr__(config, name, value)
    try:
        yield
    finally:
        object.__setattr__(config, name, before)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configurations that modules of ``model`` read, each once."""
    configs = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    return list(configs.values())


# Mixtures of experts, which may route a token differently when a weight moves a little, so that differences are large.

TOPK = (torch.topk, torch.Tensor.topk)


class FirstChoice(TorchFunctionMode):
    """Mode that makes later forward passes choose by ``topk`` what the first one inside chose.

    The derivative of the values is that of ``topk``, whose indices have none. Each ``with`` block is one forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: list[Tensor] = []
        self._begun = False
        self._at = 0

    @override
    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._at = 0
        return self

    @override
    def __exit__(self, *failure: Any) -> None:
        self._begun = True
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        if not self._begun:
            self._chosen.append(func(*args, **kwargs).indices)
        indices = self._chosen[self._at]
        self._at += 1
        source = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return torch.return_types.topk((source.gather(dim, indices), indices))


# The boundary to the model's own code: any kernel of any model may fail here.

T = TypeVar("T")

SHOWN = 200
"""Largest number of characters of an error that are shown."""


def tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of ``work()`` and "", or None and the reason of a failure: no derivative, a kernel, memory.

    Raises no ``Exception``, because with several ranks the others wait for this one's answer. The reason is the error's
    type and first line.
    """

    def failed(error: Exception) -> tuple[T | None, str]:
        most = len(f"{type(error).__name__}: ") + SHOWN  # what a kernel raises has no common type
        return None, next(iter(described(error, most).splitlines()))

    return call_or(lambda: (work(), ""), failed)


def out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` means that the machine or the device had no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


# Random numbers that a forward pass drew (dropout), given to a pass of some of its sequences alone.
#
# A sequence that runs alone would draw other numbers: the generator has advanced, and a kernel draws for a whole tensor
# at once. So the micro-batch runs once without a graph, and the numbers that its kernels draw are kept, booleans as
# such: one byte for each element of dropout, of which training keeps four and more. A sequence alone then gets its own
# numbers. The generator's state identifies each draw, so that recomputed activations (gradient checkpointing) get
# theirs as well.
#
# Kernels that draw internally (fused attention with dropout) do not show their numbers. Then, and whenever a shape does
# not identify the sequences, Undivided is raised.


PLAIN = (
    "bernoulli", "bernoulli_", "uniform", "uniform_", "normal", "normal_", "exponential", "exponential_", "geometric_",
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random_", "randperm", "native_dropout",
)  # fmt: skip
"""Operations whose random numbers depend only on the generator and their arguments."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that one operation drew, and the state of the generator afterwards."""

    values: Tensor
    after: Tensor


class Draws:
    """Random numbers that the forward pass of a micro-batch of ``count`` sequences draws, kept by :meth:`of`.

    The generators must be as they were when the forward pass began whenever a pass of some sequences begins.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.kept: dict[tuple[Any, bytes], Draw] = {}

    @classmethod
    def of(cls, one: LossPass) -> Draws:
        """Repeat the whole forward pass of ``one`` and keep the random numbers that it draws.

        The states of the random generators change.

        Raises
        ------
        Undivided
            If a kernel draws random numbers that cannot be read.
        """
        draws = cls(one.shape[0])
        one.random.restore()
        with torch.no_grad(), _Kept(draws):
            one.forward()
        return draws

    def given_to(self, rows: Sequence[int]) -> TorchDispatchMode:
        """Return a mode in which operations get the kept numbers of the sequences ``rows``.

        The backward pass must run inside the mode as well. Inside, :class:`Undivided` is raised if the kept numbers do
        not fit.
        """
        return _Given(self, rows)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that intercepts every operation that may draw random numbers."""

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
    """Return the part of ``values`` that belongs to ``rows``, of ``count``, in the form ``shape``."""
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
    """Return True for a function that draws 0 and 1."""
    return "bernoulli" in _name(func) or _name(func) == "native_dropout"


def _mask_of(func: Any, result: Any) -> Tensor | None:
    """Return the tensor that was drawn: of fused dropout its mask; None for queries about kernels."""
    parts = result if isinstance(result, tuple | list) else (result,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    return tensors[-1 if _name(func) == "native_dropout" else 0] if tensors else None


def _state(like: Tensor) -> bytes:
    return state_of(like).numpy().tobytes()


def _states() -> list[bytes]:
    """Return the states of the accelerator's generators, one a device, and of the CPU's, which is the last."""
    return [state.numpy().tobytes() for state in (*device_states(), torch.get_rng_state())]


def _of(states: Sequence[bytes], like: Tensor) -> bytes:
    return states[place_of(like)]
