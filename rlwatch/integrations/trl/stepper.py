"""The rhythm of a step: seal what was measured, deliver it, and obey commands at generation boundaries."""

from __future__ import annotations

from collections import deque
from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from rlwatch.integrations.seam import Seam, guarded
from rlwatch.integrations.step_tally import Decode, SealedStep
from rlwatch.integrations.trl.control import Control
from rlwatch.integrations.trl.taps import Taps


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Ends a step's tally and records it before anything of the next step.

    A sealed step is recorded as soon as its copy has arrived: usually when the step is logged, at the latest
    when the next one begins. That is the only wait for the device, once a step, before the rollouts.
    """

    def __init__(self, trainer: Any, taps: Taps, seam: Seam, decode: Decode | None = None) -> None:
        self.seam = seam
        self.latest: dict[str, float] = {}
        self._taps = taps
        self._decode = decode
        self._sealed: deque[SealedStep] = deque()
        self._control = Control(trainer, seam, lambda: self.latest)

    @override
    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what an earlier attempt left half-measured; take up what a checkpoint kept."""
        self._taps.discard()
        self._control.begin(state.global_step)

    @override
    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver what the last step measured."""
        self.deliver()

    @override
    @guarded
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read gradients nobody clipped."""
        self._taps.gradients_if_unclipped()

    @override
    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the step, then see what people want."""
        self.seal(state.global_step)
        self.deliver(wait=False)
        self._notice_sync(args, state.global_step)
        self._control.loop.look(args, state, control, kwargs)
        self._control.obey(state.global_step)

    @override
    @guarded
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep with the checkpoint what it leaves out."""
        self._control.saved(state.global_step)

    @override
    @guarded
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer has just waited for the device, so the copy is there."""
        self.deliver(wait=False)

    @override
    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the last step."""
        self.deliver()

    def seal(self, step: int) -> None:
        """End the current tally as that of ``step``."""
        tally, run = self._taps.take(), self.seam.run
        if run is not None and run.active:
            self._sealed.append(tally.seal(step))

    def seal_unfinished(self, step: int) -> None:
        """Training died within ``step``: what was measured of it so far is kept."""
        if not self._taps.tally.empty:
            self.seal(step)

    def deliver(self, *, wait: bool = True) -> None:
        """Record sealed steps, in order; without ``wait`` only those whose copy has arrived."""
        while self._sealed and (wait or self._sealed[0].ready()):
            sealed = self._sealed.popleft()
            if self.seam.run is not None:
                self.latest = sealed.deliver(self.seam.run, self._decode)

    def _notice_sync(self, args: Any, step: int) -> None:
        """TRL's own ``sync_ref_model`` moves the reference too; KL begins anew then."""
        run = self.seam.run
        if run is not None and getattr(args, "sync_ref_model", False) and step % args.ref_model_sync_steps == 0:
            mixup = args.ref_model_mixup_alpha
            run.event("reference_reset", step, by="SyncRefModelCallback", optimizer="keep", mixup=mixup)
            self._control.kept.moved()
