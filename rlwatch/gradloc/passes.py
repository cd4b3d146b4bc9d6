"""The loss passes of one optimizer step, kept so that each can be run again exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.tensors.tokens import TokenBatch

# Random number generators of the accelerator in use, whichever it is: CUDA, XPU, MPS, or one that a plugin brings.


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


# The loss passes of one optimizer step, kept so that each can be run again exactly as it was.


COEFFICIENTS = "coefficients of the loss"
"""Name of the tap that reads them during the backward."""
IDENTITY = {
    "prompt_index": int, "prompt": str, "group": str, "sample": int, "rollout": str, "task": str,
    "sampler_version": int, "reward_parts": str,
}  # fmt: skip
"""Optional facts of a sequence, and their types; :data:`rlwatch.export.COLUMNS` describes each."""
Read = Callable[[Tensor], object]
"""A hook of the backward: it is given the gradient of an output."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one forward pass that a loss takes: all its gradient flows through these.

    Parameters
    ----------
    logp
        (B, T) log-probs of the sampled tokens, nats.
    entropy
        (B, T) entropies, nats; None where the loss has no entropy bonus.
    aux
        0-d auxiliary loss of the model (a router's balance); None where there is none.
    """

    logp: Tensor
    entropy: Tensor | None = None
    aux: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Parts that exist, by name."""
        parts = {"logp": self.logp, "entropy": self.entropy, "aux": self.aux}
        return {name: part for name, part in parts.items() if part is not None}


class Forward(Protocol):
    """A forward pass of the loss, to be run again: with the model, the inputs and the mode it had."""

    def __call__(self, rows: Sequence[int] | None = None) -> Outputs:
        """Run it; of some sequences of the micro-batch only, if ``rows`` is given (then ``aux`` may be None).

        Raises :class:`Undivided` if it cannot be run for some only.
        """
        ...


class Undivided(Exception):  # noqa: N818  (an answer, not a fault)
    """The sequences of a micro-batch cannot be run alone as they ran together. Its text has the reason."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Random number generators as a forward pass found them: the CPU's, and those of the accelerators in use."""

    cpu: Tensor
    devices: Sequence[Tensor] = ()

    @classmethod
    def now(cls) -> RandomState:
        """Read the generators as they are. Draws nothing, and waits for no device."""
        return cls(torch.get_rng_state(), device_states())

    def restore(self) -> None:
        """Make them so again."""
        torch.set_rng_state(self.cpu)
        set_device_states(self.devices)

    def same(self, other: RandomState) -> bool:
        """Check that nothing was drawn between the two. States lie on the CPU: no device is waited for."""
        return self._bytes() == other._bytes()

    def _bytes(self) -> list[bytes]:
        return [state.numpy().tobytes() for state in (self.cpu, *self.devices)]


@dataclass(slots=True)
class LossPass:
    """One micro-batch of the step: how to run its forward again, and what the loss did with its outputs.

    Parameters
    ----------
    forward
        Runs the same forward again.
    tokens
        What is known of its tokens, detached: B sequences, T positions.
    random
        Generators as the forward found them.
    drew
        Whether the forward drew random numbers (dropout): then a part of the micro-batch would draw others, and must be
        given them (:mod:`rlwatch.gradloc.rerun`).
    divides
        Whether sequences can be run alone; None where that was not tried: then what they give is compared.
    first_row
        Sequences before it in this step, on this rank.
    rewards
        (B,) rewards of the sequences, where they are known.
    coefficients
        dL/dlogp (B, T), dL/dentropy (B, T) and dL/daux (0-d) under ``"logp"``, ``"entropy"``, ``"aux"``: filled by
        :meth:`hook` during the backward. They carry all scaling of the loss: by micro-batches, tokens, a loss scale.
    differentiable
        The same forward in operations that all have a forward derivative, where ``forward`` has others (a fused head).
    groups, tasks
        To which prompt and task each sequence belongs, where that is known.
    identity
        What else the trainer knows of each sequence, see :meth:`identify`.
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
        """(B, T)."""
        rows, positions = self.tokens.logp.shape
        return int(rows), int(positions)

    def coefficient(self, name: str = "logp") -> Tensor:
        """dL/d``name``; zeros where the loss did not use it (or did not run its backward)."""
        coefficient = self.coefficients.get(name)
        if coefficient is not None:
            return coefficient
        return torch.zeros((), device=self.tokens.logp.device) if name == "aux" else torch.zeros_like(self.tokens.logp)

    def hook(self, outputs: Outputs, contained: Callable[[Read], Read]) -> None:
        """Read the coefficients when the loss runs its backward. The outputs and their gradients are not changed.

        ``contained`` makes of what reads one a hook that nothing raises through.
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
    """The loss passes of the step under way, in order. Holds inputs and coefficients until :meth:`clear`.

    Hooks run within the backward of training, where the device may have no memory left for a copy: what they raise ends
    at ``seam``, and the step is ``broken``. To localise it without a coefficient would accuse the wrong tokens.
    """

    seam: ErrorBoundary = field(default_factory=ErrorBoundary)
    all: list[LossPass] = field(default_factory=list)
    _unread: int = 0

    @property
    def rows(self) -> int:
        """Sequences so far."""
        return sum(one.shape[0] for one in self.all)

    @property
    def broken(self) -> bool:
        """True where a coefficient of this step could not be read."""
        return self._unread > 0 or not self.seam.works(COEFFICIENTS)

    def contained(self, read: Read) -> Read:
        """``read`` as a hook of training's backward."""

        def hooked(gradient: Tensor) -> None:
            self._unread += 1  # until it is
            self.seam.attempt(COEFFICIENTS, self._read, read, gradient)

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
        """Keep one, before its backward; ``random`` is as its forward found the generators.

        Once reading coefficients was given up, nothing is kept: every step is broken.
        """
        one = LossPass(forward, tokens, random, drew, divides, self.rows, rewards, differentiable=differentiable)
        if self.seam.works(COEFFICIENTS):
            one.hook(outputs, self.contained)
            self.all.append(one)
        return one

    def clear(self) -> None:
        """Forget them: the step is over."""
        self.all.clear()
        self._unread = 0
