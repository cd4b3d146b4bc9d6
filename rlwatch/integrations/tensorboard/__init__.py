"""TensorBoard: every scalar this process writes with a ``SummaryWriter``, recorded and judged here too.

>>> import rlwatch
>>> rlwatch.tee_tensorboard(project="math-rl")  # doctest: +SKIP

Knows ``torch.utils.tensorboard`` and ``tensorboardX``, and imports them only when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from rlwatch.errors import ConfigError, MissingExtraError
from rlwatch.integrations.tee.handle import Tee
from rlwatch.integrations.tee.settings import settings
from rlwatch.run import Run

CALL = "rlwatch.tee_tensorboard()"
WRITERS = ("torch.utils.tensorboard", "tensorboardX")

_newest: Tee[Any] | None = None


def tee_tensorboard(*, run: Run | None = None, send_back: bool = False, **init_kwargs: Any) -> Tee[Any]:
    """Record the scalars this process writes to TensorBoard, from now on; for writers made before or after.

    As for TensorBoard itself a directory is a run: it begins with its first scalar, and ends when its writer is closed.
    It is remembered in ``rlwatch.json`` beside the event files, so that a restart in the same directory continues it.
    The event files are as without (but for ``send_back``). ``add_scalars("losses", {"actor": x})`` is recorded as
    ``losses/actor``; what is no number is left out.

    Parameters
    ----------
    run
        A run to record everything into; whoever made it ends it.
    send_back
        Whether to write the forecast, too: ``forecast/p20``, ``forecast/p50``, ``forecast/p100``... at their steps.
    init_kwargs
        Arguments of :func:`rlwatch.init`. ``run_id`` and ``output_dir`` name the first run only.

    Returns
    -------
    Tee
        ``.run`` and ``.runs`` are what is recorded; ``.untee()`` stops it.

    Raises
    ------
    MissingExtraError
        If there is neither ``torch.utils.tensorboard`` nor ``tensorboardX``.
    ConfigError
        If TensorBoard is mirrored already, or an argument is wrong.
    StoreError
        If the store cannot be opened.
    """
    global _newest
    writers = list(_writers())
    if not writers:
        raise MissingExtraError("tensorboard", "tensorboard", CALL)
    if _newest is not None and _newest.patches.on:
        raise ConfigError(f"TensorBoard is mirrored already; call untee() on what the first {CALL} returned")
    from rlwatch.integrations.tensorboard.hooks import Hooks

    tee: Tee[Any] = Tee("TensorBoard", settings(init_kwargs, run, CALL), run)
    Hooks(tee, writers, send_back=send_back)
    _newest = tee
    return tee


def _writers() -> Iterator[type]:
    for name in WRITERS:
        try:
            yield import_module(name).SummaryWriter
        except ImportError:
            continue
