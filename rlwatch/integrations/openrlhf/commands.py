"""Commands to an OpenRLHF training, executed in the process of its trainer, when a step has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import Controller, SaveCheckpoint, SetKLCoef, Stop
from rlwatch.records import JSON, Command

NO_REFERENCE = "there is no reference model: algo.kl.init_coef is 0"
ADAPTIVE = "the KL controller is adaptive (algo.kl.target): it would set the coefficient again"
CANNOT = {
    "reset-reference": "OpenRLHF's reference lives in Ray actors that only load weights from a directory; save a "
    "checkpoint and start again with it as actor.model_name_or_path: it is then policy and reference",
    "rollback": "the weights live in the DeepSpeed engines of OpenRLHF's policy actors, which rlwatch cannot write; "
    "start again with --ckpt.load_enable",
    "lower-lr": "OpenRLHF's learning rate lives in the DeepSpeed engines of its policy actors, which take no orders",
}
"""Commands that OpenRLHF cannot execute -> the reason."""


class Refused:
    """Handler of a kind of command that OpenRLHF cannot execute; it refuses with the reason."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def check(self, command: Command) -> None:  # noqa: ARG002  (the signature of the port)
        """Raise ``RLWatchError`` with the reason why the command cannot be executed."""
        raise RLWatchError(CANNOT[self.kind])

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Refuse like :meth:`check`; never called, because the check fails first."""
        self.check(command)
        return {}


class OpenRLHFCommands:
    """Executor of commands: save a checkpoint, stop, pause, change the KL coefficient. Call :meth:`obey` before
    OpenRLHF saves a step.

    ``saving`` and ``stopping`` are True after a command that requests a checkpoint or the end of training.
    """

    def __init__(self, trainer: Any, seam: ErrorBoundary) -> None:
        self.stopping = False
        self.saving = False
        self._trainer = trainer
        self._controller = Controller(
            seam,
            [
                SaveCheckpoint(self._save, self._kept, seam),
                Stop(self._stop),
                SetKLCoef(self._kl_coef, self._set_kl_coef, seam),
                *map(Refused, CANNOT),
            ],
        )

    def obey(self, step: int) -> None:
        """Execute the waiting commands after ``step``; they may set ``saving`` and ``stopping``."""
        self.saving = False
        self._controller.obey(step)

    def _save(self) -> str:
        self.saving = True
        return f"a checkpoint is saved under {self._trainer.args.ckpt.path} as soon as this step has ended"

    def _kept(self) -> int | None:
        limit = getattr(self._trainer.args.ckpt, "max_num", None)
        return None if limit is None else int(limit)

    def _stop(self, save: bool) -> str:
        if not hasattr(self._trainer, "samples_generator"):
            raise RLWatchError("the asynchronous trainer generates in another actor, which takes no orders")
        self.stopping = True
        return "training ends before the next rollouts" + (f"; {self._save()}" if save else "")

    def _kl_coef(self) -> float:
        if self._trainer.reference_model_group is None:
            raise RLWatchError(NO_REFERENCE)
        if getattr(self._trainer.args.algo.kl, "target", None):
            raise RLWatchError(ADAPTIVE)
        return float(self._trainer.kl_ctl.value)

    def _set_kl_coef(self, value: float) -> None:
        """Set the value of the controller that the experience maker uses, too, and that actors get for every update."""
        self._trainer.kl_ctl.value = value
