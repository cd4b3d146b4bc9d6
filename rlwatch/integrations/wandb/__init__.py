"""Weights & Biases: every ``wandb.log`` of this process, recorded and judged here too.

>>> import rlwatch
>>> rlwatch.tee_wandb(project="math-rl")  # doctest: +SKIP

Imports wandb only when it is called.
"""

from __future__ import annotations

from typing import Any

from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.integrations.tee.handle import Tee
from rlwatch.integrations.tee.settings import settings
from rlwatch.run import Run

CALL = "rlwatch.tee_wandb()"

_newest: Tee[Any] | None = None


def tee_wandb(
    *, run: Run | None = None, step_metric: str | None = None, send_back: bool = False, **init_kwargs: Any
) -> Tee[Any]:
    """Record what this process logs to wandb, from now on; call it before or after ``wandb.init``.

    Each wandb run becomes a run of rlwatch with its first row, under wandb's project, name, tags and configuration
    (secrets blacked out). ``wandb.finish`` finishes it; a run that wandb resumes is resumed. wandb itself works as
    without, online, offline or disabled.

    Scalars are kept under wandb's names, nested ones as ``outer.inner``; what is no number is left out. How a row's
    step is found: :mod:`rlwatch.integrations.wandb.steps`.

    Parameters
    ----------
    run
        A run to record everything into, for example the one of a watched trainer; whoever made it ends it.
    step_metric
        The metric that holds the optimizer step, if it is not one of the well-known ones.
    send_back
        Whether to tell wandb what rlwatch finds: firing alerts by ``wandb.alert``, and as the metric
        ``rlwatch/<kind>`` 1 to 3 for as long as a finding of that kind holds as info, warning or critical; and the
        forecast of the step before as ``forecast/p20``, ``forecast/p50``, ``forecast/p100``...
    init_kwargs
        Arguments of :func:`rlwatch.init`, which win over what wandb knows. ``run_id`` and ``output_dir`` name the
        first run only. ``source`` (``"openrlhf"``, ``"verl"``...) says how names that differ between trainers are read.

    Returns
    -------
    Tee
        ``.run`` and ``.runs`` are what is recorded; ``.untee()`` stops it.

    Raises
    ------
    MissingExtraError
        If wandb is not installed.
    ConfigError
        If wandb is mirrored already, or an argument is wrong.
    StoreError
        If the store cannot be opened.
    """
    global _newest
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("wandb", "wandb", CALL) from error
    if _newest is not None and _newest.patches.on:
        raise ConfigError("wandb is mirrored already; call untee() on what the first rlwatch.tee_wandb() returned")
    from rlwatch.integrations.wandb.hooks import Hooks, run_class

    if run_class(wandb) is None:
        raise ConfigError(
            f"{CALL} does not know this wandb ({getattr(wandb, '__version__', 'no version')}): no Run.log"
        )
    tee: Tee[Any] = Tee("wandb", settings(init_kwargs, run, CALL), run)
    Hooks(tee, wandb, step_metric=step_metric, send_back=send_back)
    _newest = tee
    return tee
