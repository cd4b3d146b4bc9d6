"""The loss passes of one optimizer step, kept so that each can be repeated exactly, and gradients of their parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.gradloc.distributed import World, reshard, unsynchronised
from rlwatch.tensors.gradnorm import Piece, layer_of, norm_of_each
from rlwatch.tensors.tokens import TokenBatch

# Random number generators of the accelerator in use, whichever it is: CUDA, XPU, MPS, or one that a plugin brings.


def accelerator() -> Any:
    """Return the module of the accelerator that this process uses (``torch.cuda``, ``torch.xpu``...).

    The result is None while the process uses no accelerator.
    """
    device = torch.accelerator.current_accelerator()
    module = None if device is None else getattr(torch, device.type, None)
    if module is None or not hasattr(module, "get_rng_state") or not module.is_available():
        return None
    return module if getattr(module, "is_initialized", lambda: True)() else None


def device_states() -> tuple[Tensor, ...]:
    """Return the states of the accelerator's random number generators, one for each device, on the CPU.

    It does not wait for the device.
    """
    module = accelerator()
    if module is None:
        return ()
    every = getattr(module, "get_rng_state_all", None)
    return (module.get_rng_state(),) if every is None else tuple(every())


def set_device_states(states: Sequence[Tensor]) -> None:
    """Restore ``states``, which :func:`device_states` returned."""
    module = accelerator()
    if module is None or not states:
        return
    every = getattr(module, "set_rng_state_all", None)
    if every is None:
        module.set_rng_state(states[0])
    else:
        every(list(states))


def place_of(like: Tensor) -> int:
    """Return the index of the generator for the device of ``like`` in :func:`device_states`.

    The result is -1 for the CPU's generator.
    """
    module = accelerator()
    if module is None or getattr(torch, like.device.type, None) is not module:
        return -1
    return (like.device.index or 0) if hasattr(module, "get_rng_state_all") else 0


def state_of(like: Tensor) -> Tensor:
    """Return the state of the random number generator for the device of ``like``."""
    place = place_of(like)
    return torch.get_rng_state() if place < 0 else device_states()[place]


def set_state_of(like: Tensor, state: Tensor) -> None:
    """Set the random number generator for the device of ``like`` to ``state``; those of other devices are unchanged."""
    place = place_of(like)
    if place < 0:
        torch.set_rng_state(state)
        return
    states = list(device_states())
    states[place] = state
    set_device_states(states)


# The loss passes of one optimizer step, kept so that each can be repeated exactly as it was.


COEFFICIENTS = "coefficients of the loss"
"""Name, in error counts, of the hook that reads the coefficients during the backward pass."""
IDENTITY = {
    "prompt_index": int, "prompt": str, "group": str, "sample": int, "rollout": str, "task": str,
    "sampler_version": int, "reward_parts": str,
}  # fmt: skip
"""Optional facts about a sequence, and their types; :data:`rlwatch.export.COLUMNS` describes each."""
Read = Callable[[Tensor], object]
"""Hook of the backward pass, which receives the gradient of an output."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one forward pass that a loss uses: all its gradient flows through them.

    Parameters
    ----------
    logp
        (B, T) log-probs of the sampled tokens, nats.
    entropy
        (B, T) entropies, nats; None if the loss has no entropy bonus.
    aux
        0-d auxiliary loss of the model (a router's balance); None if there is none.
    """

    logp: Tensor
    entropy: Tensor | None = None
    aux: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Return the outputs of the forward pass that exist: ``logp``, ``entropy``, ``aux`` -> tensor."""
        parts = {"logp": self.logp, "entropy": self.entropy, "aux": self.aux}
        return {name: part for name, part in parts.items() if part is not None}


class Forward(Protocol):
    """A forward pass of the loss that can be repeated: with the model, the inputs and the mode that it had."""

    def __call__(self, rows: Sequence[int] | None = None) -> Outputs:
        """Repeat the pass and return its outputs; only for the sequences ``rows`` of the micro-batch if given.

        With ``rows`` the output ``aux`` may be None. Raises :class:`Undivided` if the pass cannot run for some
        sequences only.
        """
        ...


class Undivided(Exception):  # noqa: N818  (an answer, not a fault)
    """Signal that sequences of a micro-batch cannot be run alone as they ran together. Its text is the reason."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the random number generators before a forward pass: the CPU's, and those of the accelerators in use."""

    cpu: Tensor
    devices: Sequence[Tensor] = ()

    @classmethod
    def now(cls) -> RandomState:
        """Return the current states of the generators. Draws nothing, and waits for no device."""
        return cls(torch.get_rng_state(), device_states())

    def restore(self) -> None:
        """Set the random number generators of this process to the kept states."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices)

    def same(self, other: RandomState) -> bool:
        """Return True if no number was drawn between this state and ``other``.

        States lie on the CPU: it waits for no device.
        """
        return self._bytes() == other._bytes()

    def _bytes(self) -> list[bytes]:
        return [state.numpy().tobytes() for state in (self.cpu, *self.devices)]


@dataclass(slots=True)
class LossPass:
    """One micro-batch of the step: how to repeat its forward pass, and how the loss depends on its outputs.

    Parameters
    ----------
    forward
        Repeats the forward pass.
    tokens
        Known quantities of its tokens, detached: B sequences, T positions.
    random
        States of the generators before the forward pass.
    drew
        True if the forward pass drew random numbers (dropout). Then a part of the micro-batch would draw others, and
        must be given the same (:mod:`rlwatch.gradloc.rerun`).
    divides
        True if sequences can be run alone; None if that was not tried, so that results are compared first.
    first_row
        Number of sequences before it in this step, on this rank.
    rewards
        (B,) rewards of the sequences, if they are known.
    coefficients
        dL/dlogp (B, T), dL/dentropy (B, T) and dL/daux (0-d) under ``"logp"``, ``"entropy"``, ``"aux"``: filled by
        :meth:`hook` during the backward pass. They carry all scaling of the loss: by micro-batches, tokens, a loss
        scale.
    differentiable
        The same forward pass in operations that all have a forward derivative, if ``forward`` has others (a fused
        head).
    groups, tasks
        Prompt and task of each sequence, if known.
    identity
        Other facts that the trainer knows about each sequence, see :meth:`identify`.
    """

    forward: Forward
    tokens: TokenBatch
    random: RandomState
    drew: bool = False
    divides: bool | None = True
    first_row: int = 0
    rewards: Tensor | None = None
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    differentiable: Forward | None = None
    groups: Sequence[str] | None = None
    tasks: Sequence[str] | None = None
    identity: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def identify(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Set facts of the sequences: B values for each known column of :data:`IDENTITY`, None for an unknown value.

        Columns of another name or length are left out.
        """
        fitting = {name: list(values) for name, values in columns.items() if len(values) == self.shape[0]}
        self.identity = {name: values for name, values in fitting.items() if name in IDENTITY}
        for name in ("group", "task"):
            values = self.identity.get(name)
            if values is not None and None not in values:
                setattr(self, f"{name}s", [str(value) for value in values])

    @property
    def shape(self) -> tuple[int, int]:
        """Return (B, T), the numbers of sequences and positions."""
        rows, positions = self.tokens.logp.shape
        return int(rows), int(positions)

    def coefficient(self, name: str = "logp") -> Tensor:
        """Return the loss differentiated by the output ``name``, dL/d``name``; zeros if the loss did not use that
        output or had no backward pass.
        """
        coefficient = self.coefficients.get(name)
        if coefficient is not None:
            return coefficient
        return torch.zeros((), device=self.tokens.logp.device) if name == "aux" else torch.zeros_like(self.tokens.logp)

    def hook(self, outputs: Outputs, contained: Callable[[Read], Read]) -> None:
        """Register hooks on ``outputs`` that read dL/dlogp, dL/dentropy and dL/daux when the loss runs its backward
        pass.

        Outputs and gradients are not changed. ``contained`` wraps a hook so that its errors do not propagate.
        """
        for name, part in outputs.parts().items():
            if part.requires_grad:
                part.register_hook(contained(_Reader(self.coefficients, name)))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Reader:
    into: dict[str, Tensor]
    name: str

    def __call__(self, gradient: Tensor) -> None:
        """Add a gradient: a second backward through the same forward adds to the first, as its gradient does."""
        before = self.into.get(self.name)
        self.into[self.name] = gradient.detach().clone() if before is None else before + gradient.detach()


@dataclass(slots=True)
class RecordedPasses:
    """The recorded micro-batches (loss passes) of the current step, in order, with inputs and coefficients, until
    :meth:`clear`.

    Hooks run within the backward pass of training, where the device may have no memory left for a copy.
    ``error_boundary``, the error boundary, contains their errors, and the step is then ``broken``: localising it
    without a coefficient would blame the wrong tokens.
    """

    error_boundary: ErrorBoundary = field(default_factory=ErrorBoundary)
    all: list[LossPass] = field(default_factory=list)
    _unread: int = 0

    @property
    def rows(self) -> int:
        """Return the number of sequences in the recorded micro-batches of this step."""
        return sum(one.shape[0] for one in self.all)

    @property
    def broken(self) -> bool:
        """Return True if a coefficient (dL/dlogp and others) of this step could not be read."""
        return self._unread > 0 or not self.error_boundary.works(COEFFICIENTS)

    def contained(self, read: Read) -> Read:
        """Return ``read`` as a hook for training's backward pass: its errors do not propagate, and are counted."""

        def hooked(gradient: Tensor) -> None:
            self._unread += 1  # until it is
            self.error_boundary.attempt(COEFFICIENTS, self._read, read, gradient)

        return hooked

    def _read(self, read: Read, gradient: Tensor) -> None:
        read(gradient)
        self._unread -= 1

    def add(
        self,
        forward: Forward,
        outputs: Outputs,
        tokens: TokenBatch,
        *,
        random: RandomState,
        drew: bool = False,
        divides: bool | None = True,
        rewards: Tensor | None = None,
        differentiable: Forward | None = None,
    ) -> LossPass:
        """Keep a micro-batch's forward pass, before its backward pass, and return it as a loss pass.

        The arguments are fields of :class:`LossPass`. Once the reading of coefficients was given up, nothing is kept:
        every step is broken.
        """
        one = LossPass(forward, tokens, random, drew, divides, self.rows, rewards, differentiable=differentiable)
        if self.error_boundary.works(COEFFICIENTS):
            one.hook(outputs, self.contained)
            self.all.append(one)
        return one

    def clear(self) -> None:
        """Forget the recorded micro-batches at the end of the step."""
        self.all.clear()
        self._unread = 0


# Gradients of parts of the loss; the gradients that training holds are unchanged.
#
# A part is given by weights for the outputs of a loss pass: the coefficients of some tokens, zero elsewhere. Autograd
# does the rest, so any loss can be divided into parts without a derivation. Precision is that of the training's own
# backward pass: gradients of bfloat16 parameters are rounded to 8 bits, norms are summed in float32 and float64.

Weights = Mapping[str, Tensor]
"""Name of an output -> weights by which its elements are multiplied, in its shape."""


@contextmanager
def beside_training(model: nn.Module) -> Iterator[None]:
    """Allow gradients to be computed in the ``with`` block.

    Afterwards restore ``.grad``, buffers, random state and modes, bit for bit. Ranks may run different numbers of
    passes inside: DDP neither sends buffers nor expects gradients. Compiled code runs eagerly, because other shapes
    would be compiled again.
    """
    reshard(model)
    random = RandomState.now()
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_kept_buffers(model))
            stack.enter_context(unsynchronised())
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        reshard(model)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        random.restore()


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Keep buffers: afterwards they are the same tensors with the same content."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, content in buffers:
                setattr(module, name, buffer)
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


def run_again(one: LossPass, rows: Sequence[int] | None = None) -> Outputs:
    """Repeat the forward pass of ``one`` as it was, and return its outputs.

    If ``rows`` is given, only these sequences are repeated.
    """
    one.random.restore()
    return one.forward() if rows is None else one.forward(rows)


class Gradients(Protocol):
    """Interface to norms of gradients of parts of a model's loss."""

    @property
    def layers(self) -> Sequence[str]:
        """Names of the layers, in model order."""
        ...

    @property
    def together(self) -> bool:
        """Return True if all ranks must take part in each computation."""
        ...

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return the squared norm in each layer of the gradient of sum ``weights`` * ``outputs``: this rank's part,
        (L,), on the CPU.

        If only one rank has weights, the parts of all ranks sum up to the squares of the mean of the ranks' gradients,
        as training has it. ``again``: another call for the same outputs follows.
        """
        ...


def gradients_of(model: nn.Module, world: World) -> Gradients:
    """Return :class:`ShardedGradients` if the parameters of ``model`` are DTensors (FSDP2), else :class:`Whole`."""
    reshard(model)
    sharded = any(hasattr(p, "to_local") for p in model.parameters())
    return ShardedGradients(model) if sharded else Whole(model, world)


class _Layers:
    """The parameters that are trained, and the layers that contain them."""

    def __init__(self, model: nn.Module) -> None:
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.layers = list(dict.fromkeys(layer_of(name) for name, _ in self.named))
        place = {layer: i for i, layer in enumerate(self.layers)}
        self._place = [place[layer_of(name)] for name, _ in self.named]

    def _squares(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return (L,), float64, CPU, from a gradient (or None) for each of the parameters.

        Waits for the device, once.
        """
        total = torch.zeros(len(self.layers), dtype=torch.float64, device="cpu")
        there = [(at, g) for at, g in zip(self._place, gradients, strict=True) if g is not None and g.numel()]
        if there:
            places, present = zip(*there, strict=True)
            squares = torch.stack(norm_of_each(present)).double().square().cpu()
            total.index_add_(0, torch.tensor(places, device="cpu"), squares)
        return total


class Whole(_Layers):
    """Gradients of parameters that every rank has whole (one process, or DDP): each rank computes its own and waits for
    none.

    ``torch.autograd.grad`` accumulates nowhere, so that neither ``.grad`` nor DDP's or an optimizer's hooks are
    affected. It takes memory for one more set of gradients.
    """

    together = False

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._ranks = world.size

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return squared norms of each layer, as :class:`Gradients` describes.

        Weights that are all zero are not differentiated.
        """
        parts = {n: p for n, p in outputs.parts().items() if p.requires_grad and n in weights and weights[n].any()}
        if not parts:
            return self._squares([None] * len(self.named))
        gradients = torch.autograd.grad(
            list(parts.values()),
            [p for _, p in self.named],
            [weights[name].to(part.dtype) for name, part in parts.items()],
            retain_graph=again,
            allow_unused=True,
        )
        return self._squares(gradients) / self._ranks**2


class ShardedGradients(_Layers):
    """Gradients of parameters that are sharded over ranks (FSDP2): all ranks run each pass, those without weights with
    zeros.

    Only an ordinary backward pass makes FSDP reduce gradients (to their mean), so ``.grad`` is cleared for it. Use it
    only within :func:`beside_training`, which restores ``.grad``.
    """

    together = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model

    def squares(self, outputs: Outputs, weights: Weights, *, again: bool = False) -> Tensor:
        """Return squared norms of each layer, as :class:`Gradients` describes. A collective."""
        for _, parameter in self.named:
            parameter.grad = None
        parts = {name: part for name, part in outputs.parts().items() if part.requires_grad}
        zeros = {name: torch.zeros_like(part) for name, part in parts.items()}
        given = [weights.get(name, zeros[name]).to(part.dtype) for name, part in parts.items()]
        torch.autograd.backward(list(parts.values()), given, retain_graph=again)
        reshard(self._model)
        return self._squares([None if p.grad is None else Piece.of(name, p, 0).counted for name, p in self.named])
