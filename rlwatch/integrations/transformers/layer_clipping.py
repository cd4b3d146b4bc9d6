"""``clip_layers(trainer)``: layer-wise clipping of gradients in any Hugging Face ``Trainer``, saved in its
checkpoints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import TrainerCallback
from typing_extensions import override

from rlwatch.clipping import Clipped, ClipRule, LayerClip
from rlwatch.error_boundary import ErrorBoundary, Tapped, copied, guarded
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.compat import lacking
from rlwatch.integrations.transformers.compat import ACCELERATOR, HIDDEN, ResumedFrom, sharding_engine

logger = logging.getLogger("rlwatch")
FILE = "rlwatch_layer_clip.pt"


def clip_layers(
    trainer: Any, rule: str | ClipRule = "layer-median", *, by: str | None = None, nonfinite: str = "keep"
) -> LayerClip:
    """Clip the gradient of every layer by its own threshold, before the trainer clips all layers together.

    First each layer is clipped by ``rule``. Then the trainer clips globally to ``max_grad_norm`` as before, and a layer
    that spikes no longer shrinks the gradients of the others. (``max_grad_norm=float("inf")`` clips layers only.) Where
    the rule scales nothing, training is bit-identical to training without it. The ``grad_norm`` that the trainer logs
    is the norm before any clipping. The state of the rule is saved with every checkpoint and restored when training
    resumes from one.

    Works with :func:`watch` in either order: it records the gradients before clipping, and what was clipped. With
    several ranks every rank calls this. On one rank a rule that raises is left out with a warning. On several ranks the
    error ends training, because ranks that clip differently would diverge unnoticed.

    Parameters
    ----------
    trainer
        A trainer that has not begun to train. Its accelerator's ``clip_grad_norm_`` is wrapped, on the instance.
    rule, by, nonfinite
        As for :class:`~rlwatch.clipping.LayerClip`.

    Returns
    -------
    LayerClip
        The clipping, with its rule and state.

    Raises
    ------
    ConfigError
        If an argument is not valid, layers are clipped already, the trainer does not clip (``max_grad_norm=0``), or an
        engine (DeepSpeed, FSDP1...) holds the gradients where they cannot be scaled.
    """
    _refuse(trainer)
    clip = LayerClip(trainer.model, rule, by=by, nonfinite=nonfinite)
    trainer.add_callback(LayerClipping(trainer, clip))
    return clip


def clipping_of(trainer: Any) -> LayerClipping | None:
    """Return the callback that :func:`clip_layers` attached to ``trainer``, or None if it was not called."""
    attached = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LayerClipping))
    return next(attached, None)


def _refuse(trainer: Any) -> None:
    """Raise ``ConfigError`` if the layers of ``trainer`` cannot be clipped."""
    if clipping_of(trainer) is not None:
        raise ConfigError("the layers of this trainer are clipped already")
    if not hasattr(trainer, "accelerator"):
        raise ConfigError("layers cannot be clipped: the trainer has no accelerator")
    reason = lacking(trainer.accelerator, ACCELERATOR)
    if reason is not None:
        raise ConfigError(f"layers cannot be clipped: {reason}")
    if not trainer.args.max_grad_norm:
        raise ConfigError(
            "layers cannot be clipped: max_grad_norm is 0, so the trainer never clips; "
            "set a global norm, or float('inf') for layers only"
        )
    engine = sharding_engine(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if engine in HIDDEN or (engine == "FSDP" and getattr(plugin, "fsdp_version", None) != 2):
        raise ConfigError(f"layers cannot be clipped: {engine} holds the gradients (FSDP2 can be clipped)")


class LayerClipping(TrainerCallback):  # type: ignore[misc]
    """Callback that clips layers before the accelerator clips, and saves the rule's state in checkpoints.

    ``before``, if set, is called with the norm between backward pass and clipping: the gradient is then complete,
    without loss scale, and not clipped. ``clipped`` is the result of this step's clipping, or None.
    """

    def __init__(self, trainer: Any, clip: LayerClip) -> None:
        self.clip = clip
        self.clipped: Clipped | None = None
        self.before: Callable[[Tensor], object] | None = None
        self.error_boundary = ErrorBoundary()
        self._trainer = trainer
        self._resumed = ResumedFrom(trainer, self.error_boundary)
        self._asked = False
        self._warned = False
        self._wrap(trainer.accelerator)

    def __reduce__(self) -> tuple[Any, ...]:
        copied("trainer whose layers are clipped", "it clips no layers either: call clip_layers for the copy")
        return TrainerCallback, ()

    def _wrap(self, accelerator: Any) -> None:
        original = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            accelerator.unscale_gradients()
            with _unscaled(accelerator):
                self.clipped = self._clip()
                total = original(parameters, *args, **kwargs)
            if self.clipped is None:
                return total
            before = self.error_boundary.attempt("norm before clipping", _before_clipping, self.clipped, total)
            return total if before is None else before

        accelerator.clip_grad_norm_ = Tapped(original, clip_grad_norm_)

    def _clip(self) -> Clipped | None:
        self._asked = True
        self.clip.model = self._trainer.model
        if self._trainer.args.world_size > 1:
            return self.clip.by_layer(self.before)
        return self.error_boundary.attempt("layers to clip", self.clip.by_layer, self.before)

    @override
    @guarded
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn once if this trainer does not clip through its accelerator, so that layers are not clipped."""
        if not self._asked and not self._warned:
            self._warned = True
            logger.warning("rlwatch does not clip layers: this trainer does not clip through its accelerator")

    @override
    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the result of this step's clipping."""
        self._asked, self.clipped = False, None

    @override
    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the clipping into the checkpoint that was just written; it is the same on every rank."""
        if not args.should_save:
            return
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        draft = checkpoint / f".{FILE}-{os.getpid()}"
        try:
            torch.save(self.clip.state_dict(), draft)
            draft.replace(checkpoint / FILE)
        except OSError as error:
            logger.warning("rlwatch could not keep layer clipping in %s (training goes on): %s", checkpoint, error)

    @override
    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state of the clipping from the checkpoint that training resumes from, on every rank as rank 0
        reads it.
        """
        checkpoint = self._resumed.checkpoint
        if checkpoint is None:
            return
        state = (
            self.error_boundary.attempt("what was kept of layer clipping", _read, checkpoint)
            if args.process_index == 0
            else None
        )
        (state,) = broadcast_object_list([state])
        try:
            if state is not None:
                self.clip.load_state_dict(state)
        except RLWatchError as error:
            logger.warning("rlwatch begins layer clipping anew: %s does not fit: %s", checkpoint / FILE, error)


def _read(checkpoint: Path) -> Any:
    return torch.load(checkpoint / FILE, map_location="cpu", weights_only=True)


def _before_clipping(clipped: Clipped, total: Any) -> Any:
    """Return the trainer's own norm, bit for bit, if no layer was scaled; else the norm before clipping."""
    if not isinstance(total, Tensor) or hasattr(total, "full_tensor"):
        return clipped.total
    return torch.where((clipped.scales == 1).all(), total, clipped.total.to(total))


@contextmanager
def _unscaled(accelerator: Any) -> Iterator[None]:
    """Replace ``accelerator.unscale_gradients`` during the ``with`` block, because a scaler raises if it unscales
    twice.
    """
    before = vars(accelerator).get("unscale_gradients")
    accelerator.unscale_gradients = lambda optimizer=None: None  # noqa: ARG005
    try:
        yield
    finally:
        if before is None:
            del accelerator.unscale_gradients
        else:
            accelerator.unscale_gradients = before
