"""Hooks (taps) on one policy actor's trainer: wrappers on the instance, and PyTorch hooks that change nothing.

The measurements of an update are sent to OpenRLHF's trainer within the result of ``ppo_train``. They are removed there
before other code sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.integrations.compat import vocab_size_of
from rlwatch.integrations.level import Level
from rlwatch.integrations.openrlhf.batch import loss_stats, token_batch
from rlwatch.integrations.openrlhf.compat import OpenRLHFSettings
from rlwatch.integrations.step_tally import StepTally, encoded_tally
from rlwatch.tensors.mergeable import Total, nonfinite

PARCEL = "rlwatch/parcel/"
"""Prefix of the keys under which measurements are sent; the rank follows."""


class ActorTaps:
    """Hooks that measure an ``ActorPPOTrainer`` during one round of updates."""

    def __init__(self, trainer: Any, settings: OpenRLHFSettings) -> None:
        self.tally = StepTally()
        self._trainer = trainer
        self._settings = settings
        self.error_boundary = ErrorBoundary()
        self._experience: Any = None
        self._entropy: Tensor | None = None

    def attach(self) -> None:
        """Install the hooks, unless another rank measures the same part of the batch."""
        if not self._settings.includes(Level.TOKENS) or not first_of_its_data(self._trainer.strategy):
            return
        read, keep = (
            self.error_boundary.hook("policy loss", self._read),
            self.error_boundary.hook("entropy", self._keep_entropy),
        )
        self._trainer.actor_loss_fn.register_forward_hook(read, with_kwargs=True)
        self._trainer.actor.register_forward_hook(keep, with_kwargs=True)
        self._wrap("training_step", before=self._remember)
        self._wrap("ppo_train", before=self._begin, after=self._send)

    def _wrap(self, name: str, *, before: Callable[..., None], after: Callable[[Any], None] | None = None) -> None:
        original = getattr(self._trainer, name)

        @wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            self.error_boundary.attempt(name, before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self.error_boundary.attempt(name, after, result)
            return result

        setattr(self._trainer, name, tapped)

    def _begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.tally, self._experience, self._entropy = StepTally(), None, None

    def _remember(self, experience: Any, *_args: Any, **_kwargs: Any) -> None:
        self._experience = experience

    def _keep_entropy(self, _actor: Any, _args: Any, kwargs: Any, output: Any) -> None:
        """Keep the entropy of an update: only its pass asks for the model's output, passes for old log-probs do not."""
        if kwargs.get("return_output"):
            entropy = getattr(output[1], "entropy", None)
            self._entropy = None if entropy is None else entropy.detach()

    def _read(self, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        entropy, self._entropy = self._entropy, None
        with torch.no_grad():
            given = {**dict(zip(("log_probs", "old_log_probs", "advantages"), args, strict=False)), **kwargs}
            batch = token_batch(loss, given, self._experience, entropy)
            self.tally.add_batch(batch, full=self._settings.includes(Level.FULL))
            value = output[0].detach()
            broken = Total.of(nonfinite(value), torch.ones_like(value, dtype=torch.bool))
            self.tally.add_stats({**loss_stats(loss, batch), "nonfinite/loss": broken})

    def _send(self, status: Any) -> None:
        """Add the measurements to the result; OpenRLHF has just waited for the device, once for each of its numbers."""
        tally, self.tally = self.tally, StepTally()
        if not isinstance(status, dict) or not status or tally.empty:
            return
        self.error_boundary.attempt("tokens", tally.measure)
        model = self._trainer.actor.model
        vocabulary = vocab_size_of(getattr(model, "module", model))
        status[f"{PARCEL}{rank_of()}"] = {
            "parcel": encoded_tally(tally, 0),
            "numbers": {} if vocabulary is None else {"policy/vocab_size": float(vocabulary)},
            "errors": self.error_boundary.errors,
        }


def rank_of() -> int:
    """Return the rank of this process among the policy's processes."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def first_of_its_data(strategy: Any) -> bool:
    """Return True on the first of the ranks that share a batch (ring attention, tensor parallelism) and so measure the
    same.
    """
    mesh = getattr(strategy, "ds_device_mesh", None)
    if mesh is None:
        return True
    names = tuple(mesh.mesh_dim_names or ())
    return all(mesh[name].get_local_rank() == 0 for name in ("sp", "tp") if name in names)
