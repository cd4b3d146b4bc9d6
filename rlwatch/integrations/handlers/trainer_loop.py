"""What every trainer of Hugging Face's family can be told at a step's end, through the callback interface alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.checkpoint import SaveCheckpoint
from rlwatch.integrations.handlers.learning_rate import LowerLR, Paced
from rlwatch.integrations.handlers.stop import Stop
from rlwatch.ports import CommandHandler
from rlwatch.seam import Seam


@dataclass(slots=True)
class TrainerLoop:
    """A ``Trainer``, as a callback is shown it; give what ``on_step_end`` gets to :meth:`look`, then obey."""

    args: Any = None
    state: Any = None
    control: Any = None
    optimizer: Any = None
    scheduler: Any = None

    def look(self, args: Any, state: Any, control: Any, shown: Mapping[str, Any]) -> None:
        """Take hold of what a callback is given; ``shown`` are its keyword arguments."""
        self.args, self.state, self.control = args, state, control
        self.optimizer, self.scheduler = shown.get("optimizer"), shown.get("lr_scheduler")

    def handlers(self, seam: Seam) -> list[CommandHandler]:
        """``save-checkpoint``, ``lower-lr`` and ``stop``."""
        return [SaveCheckpoint(self.save, self.kept, seam), LowerLR(self.paced, seam), Stop(self.stop)]

    def paced(self) -> Paced:
        """The optimizer and its schedule."""
        optimizers = [] if self.optimizer is None else [self.optimizer]
        return Paced(optimizers, [] if self.scheduler is None else [self.scheduler])

    def kept(self) -> int | None:
        """How many checkpoints the trainer keeps; None for all."""
        if self.control is None:
            raise RLWatchError("training has not begun")
        limit: int | None = self.args.save_total_limit
        return limit

    def save(self) -> str:
        """Raise the flag that makes the trainer save when its callbacks have returned."""
        self.control.should_save = True
        return f"{self._checkpoint} is saved as soon as this step has ended"

    def stop(self, save: bool) -> str:
        """Raise the flag that makes this step the last."""
        if save:
            self.save()
        self.control.should_training_stop = True
        return f"training ends with step {self.state.global_step}, " + (
            f"after saving {self._checkpoint}" if save else "without saving a checkpoint"
        )

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
