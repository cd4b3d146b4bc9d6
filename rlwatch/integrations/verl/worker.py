"""What is added to verl's ``ActorRolloutRefWorker``: the calls by which the driver reads and commands a worker.

Each is an RPC to all ranks (``ONE_TO_ALL``) that returns at once with references to the answers
(:mod:`~rlwatch.integrations.verl.replies`). Until ``rlwatch_attach`` nothing in the worker is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.verl.heartbeat import IN_PLACE
from rlwatch.integrations.verl.replies import answering


def install(module: ModuleType) -> str:
    """Add the calls to ``module.ActorRolloutRefWorker``; returns how that went."""
    from verl.single_controller.base.decorator import Dispatch, register

    remote = register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    for method in CALLS:
        setattr(module.ActorRolloutRefWorker, method.__name__, remote(answering(method)))
    return IN_PLACE


def rlwatch_attach(self: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put the taps in place.

    ``settings``: ``level``; ``bypass`` for verl's bypass mode; ``localise``, fields of ``Localise`` (None: spikes are
    not localised), with ``text`` if their text is kept. Every rank is given the same, and waits for the others.
    """
    from rlwatch.integrations.verl.inside import Inside
    from rlwatch.integrations.verl.plugin import acting

    if getattr(self, "rlwatch", None) is None:
        self.rlwatch = Inside.of(self, settings)
        acting("worker")
    localising = self.rlwatch.localising
    why_not = localising if isinstance(localising, str) else None
    return {"missing": self.rlwatch.missing, "vocab_size": self.rlwatch.vocab_size, "not_localised": why_not}


def rlwatch_collect(self: Any, step: int) -> dict[str, Any]:
    """What this rank measured since the last call, packed, as that of ``step``."""
    return dict(_inside(self).collect(step))


def rlwatch_check(self: Any, kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse if this rank cannot carry out a command; changes nothing."""
    _inside(self).check(kind, args)
    return {}


def rlwatch_do(self: Any, kind: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a command that every rank has checked."""
    return {"report": dict(_inside(self).do(kind, args))}


def rlwatch_reset_reference(self: Any, optimizer: str = "clear") -> dict[str, Any]:
    """Make the policy its own reference; the optimizer's state is cleared (``clear``) or kept (``keep``)."""
    args = {"optimizer": optimizer}
    _inside(self).check("reset-reference", args)
    return {"report": dict(_inside(self).do("reset-reference", args))}


def rlwatch_save_reference(self: Any, directory: str) -> dict[str, Any]:
    """Write this rank's part of the reference into ``directory``."""
    return {"path": _inside(self).keeper.save(directory)}


def rlwatch_forget_reference(self: Any, directory: str) -> dict[str, Any]:
    """Remove this rank's part of a reference from ``directory``, if it is there."""
    _inside(self).keeper.forget(directory)
    return {}


def rlwatch_find_reference(self: Any, directory: str) -> dict[str, Any]:
    """The fingerprint of this rank's part of a reference in ``directory``, or None; refuses one that does not fit."""
    return {"found": _inside(self).keeper.find(directory)}


def rlwatch_restore_reference(self: Any, directory: str) -> dict[str, Any]:
    """Put back this rank's part of the reference that ``directory`` holds."""
    return {"report": _inside(self).keeper.restore(directory)}


def rlwatch_kl_coef(self: Any, value: float | None = None) -> dict[str, Any]:
    """The coefficient of the KL term of the loss, set to ``value`` if one is given."""
    return {"value": _inside(self).kl_coef(value)}


def rlwatch_lowered(self: Any) -> dict[str, Any]:
    """The step until which the learning rate is lowered; 0 for none, or for good."""
    return {"until": _inside(self).lowered_until}


CALLS: tuple[Callable[..., dict[str, Any]], ...] = (
    rlwatch_attach,
    rlwatch_collect,
    rlwatch_check,
    rlwatch_do,
    rlwatch_reset_reference,
    rlwatch_save_reference,
    rlwatch_forget_reference,
    rlwatch_find_reference,
    rlwatch_restore_reference,
    rlwatch_kl_coef,
    rlwatch_lowered,
)


def _inside(worker: Any) -> Any:
    inside = getattr(worker, "rlwatch", None)
    if inside is None:
        raise RLWatchError("this worker is not watched")
    return inside
