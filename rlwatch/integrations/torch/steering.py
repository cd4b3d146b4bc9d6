"""The part of a watcher that acts on the loop: commands, and what of them must outlive the process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlwatch.integrations.torch.commands import Commands
from rlwatch.integrations.torch.means import Means
from rlwatch.integrations.torch.recording import Recording
from rlwatch.recorder.intake import step_index
from rlwatch.seam import shown

FORMAT = 1


class Steering(Recording):
    """A recording that can be told what to do, with the ``means`` its maker gave."""

    def __init__(self, means: Means, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._means = means
        self._commands = Commands(means, self.seam, lambda: self._steps.last, lambda: self.latest)

    def obey(self) -> None:
        """Carry out what people asked of the run; while it is paused, wait.

        Call it before a batch of rollouts is generated: there nothing in flight was computed with the old reference.
        Every rank calls it, at the same steps. A loop that never calls it leaves commands to expire.
        """
        self.seam.attempt("record", self._steps.deliver)
        self.seam.attempt("commands", self._commands.obey)

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked the run to stop. Ask after :meth:`obey`: a loop that never asks cannot be stopped."""
        self._means.heeds_stop = True
        return self._means.stopped

    def saved(self, checkpoint: str | os.PathLike[str]) -> None:
        """Tell that the loop has written a checkpoint into the directory ``checkpoint``. Every rank calls it.

        A reference that was reset and a KL coefficient that was set are then kept there too.
        """
        self.seam.attempt("checkpoint", lambda: self._commands.saved(Path(checkpoint)))

    def resumed(self, checkpoint: str | os.PathLike[str]) -> None:
        """Tell that the loop has read the checkpoint in the directory ``checkpoint``. Every rank calls it.

        Call it after the models were built and :meth:`load_state_dict`, before training goes on. A reference kept
        there replaces the one the loop built; otherwise a resume would silently undo the reset.
        """
        self.seam.attempt("resume", lambda: self._commands.resumed(Path(checkpoint)))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should hold of the watcher, plain numbers and texts: the step and the run."""
        return {"format": FORMAT, "step": self._steps.last, "run_id": self.run.info.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting steps where the checkpoint was written."""
        self._refuse("load_state_dict", self.seam.attempt("state", self._load, state) or {})

    def _load(self, state: Mapping[str, Any]) -> Mapping[str, str]:
        if state.get("format") != FORMAT or type(state.get("step")) is not int:
            return {"state": f"it is not what state_dict() of this version returns: got {shown(state)}"}
        self._steps.last = step_index(state["step"])
        theirs = state.get("run_id")
        if theirs != self.run.info.run_id:
            self.run.event("resume", state["step"], from_run=theirs)
        return {}
