"""Detection of the checkpoint from which a call of ``trainer.train`` resumes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from rlwatch.error_boundary import ErrorBoundary, Tapped


class ResumedFrom:
    """Wrapper of ``trainer.train`` that notes its arguments, which callbacks do not get.

    ``checkpoint`` is the directory from which the last call resumed, or None. ``seam`` is the error boundary around the
    code that finds it.
    """

    def __init__(self, trainer: Any, seam: ErrorBoundary) -> None:
        self.checkpoint: Path | None = None
        original = trainer.train
        signature = inspect.signature(original)

        def train(*args: Any, **kwargs: Any) -> Any:
            self.checkpoint = seam.attempt("resume_from_checkpoint", _checkpoint, trainer, signature, args, kwargs)
            return original(*args, **kwargs)

        trainer.train = Tapped(original, train)


def _checkpoint(trainer: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> Path | None:
    """Return the directory, resolved as the trainer does: True means the last checkpoint."""
    given = signature.bind(*args, **kwargs).arguments.get("resume_from_checkpoint")
    if given is True:
        given = get_last_checkpoint(trainer.args.output_dir)
    return Path(given) if given else None
