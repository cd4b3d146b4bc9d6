"""The rhythm of a step in TRL: commands wait for a generation boundary, and TRL moves references too."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from rlwatch.integrations.ranks import RunRanks
from rlwatch.integrations.step_tally import Decode
from rlwatch.integrations.transformers import stepper
from rlwatch.integrations.trl.control import Control
from rlwatch.integrations.trl.taps import Taps
from rlwatch.seam import Seam


class StepCallback(stepper.StepCallback):
    """The same for GRPO and RLOO; the only wait for the device comes before the rollouts."""

    def __init__(self, trainer: Any, taps: Taps, seam: Seam, decode: Decode | None = None) -> None:
        self._orders = Control(trainer, seam, lambda: self.latest, RunRanks(seam))
        self._trl_taps = taps
        super().__init__(taps, seam, lambda _latest: self._orders, decode)

    @override
    def deliver(self, *, wait: bool = True) -> None:
        before = self.latest
        super().deliver(wait=wait)
        if self.latest is not before:
            self._trl_taps.delivered(self.latest)

    @override
    def noticed(self, args: Any, step: int) -> None:
        """TRL's own ``sync_ref_model`` moves the reference too; KL begins anew then."""
        run = self.seam.run
        if run is not None and getattr(args, "sync_ref_model", False) and step % args.ref_model_sync_steps == 0:
            mixup = args.ref_model_mixup_alpha
            run.event("reference_reset", step, by="SyncRefModelCallback", optimizer="keep", mixup=mixup)
            self._orders.kept.moved()
