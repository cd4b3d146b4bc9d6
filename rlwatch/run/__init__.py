"""The facade of the trainer side: :func:`init` begins a run, :class:`Run` is how a loop holds it."""

from rlwatch.run.run import Run
from rlwatch.run.setup import init

__all__ = ["Run", "init"]
