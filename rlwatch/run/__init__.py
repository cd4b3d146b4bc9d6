"""Entry points of the training side: :func:`init` begins a run, and a training loop logs to the :class:`Run` it
returns.
"""

from rlwatch.run.run import Run
from rlwatch.run.setup import init

__all__ = ["Run", "init"]
