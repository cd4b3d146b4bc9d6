"""What a watched worker holds: its taps, and what it can be told to do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlwatch.errors import RLWatchError
from rlwatch.integrations.handlers.learning_rate import LowerLR, Paced
from rlwatch.integrations.handlers.unwrapping import unwrapped
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.step_tally import StepTally
from rlwatch.integrations.verl.anchor import ENGINES, Anchor
from rlwatch.integrations.verl.compat import missing_of_actor, policy_losses
from rlwatch.integrations.verl.keeper import Keeper
from rlwatch.integrations.verl.localising import Localising
from rlwatch.integrations.verl.taps import WorkerTaps
from rlwatch.integrations.vocabulary import vocab_size_of
from rlwatch.integrations.whole import encoded
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.seam import Seam
from rlwatch.tensors.gradnorm import Sharded


class Inside:
    """One rank's end. Nothing raises through the taps; everything else is called by the driver, and may refuse."""

    def __init__(
        self,
        worker: Any,
        seam: Seam,
        taps: WorkerTaps | None,
        missing: Mapping[str, str],
        localising: Localising | str | None = None,
    ) -> None:
        self.missing = missing
        """What cannot be measured here, and why."""
        self.localising = localising
        """What looks at spikes of the gradient, or why nothing does; None if it is not wanted."""
        self.anchor = Anchor(worker)
        self.keeper = Keeper(self.anchor, rank=int(worker.rank), world_size=int(worker.world_size))
        self._worker = worker
        self._seam = seam
        self._taps = taps
        lower: CommandHandler = LowerLR(self._paced, seam)
        self._handlers = {handler.kind: handler for handler in (lower, self.anchor)}

    @classmethod
    def of(cls, worker: Any, settings: Mapping[str, Any]) -> Inside:
        """The end of verl's ``worker``, its taps in place unless something is in their way."""
        seam, level = Seam(), Level.of(str(settings.get("level", Level.FULL)))
        actor = getattr(worker, "actor", None)
        if actor is None:
            return cls(worker, seam, None, {"measurements of the update": "this worker holds no actor"})
        found, registry = _localising(worker, seam, settings), policy_losses()
        taps = WorkerTaps(
            actor,
            registry,
            seam,
            level,
            bypass=bool(settings.get("bypass")),
            layers=str(worker.config.actor.strategy) in ENGINES,
            rank=int(worker.rank),
            localising=found if isinstance(found, Localising) else None,
        )
        taps.attach()
        return cls(worker, seam, taps, missing_of_actor(actor, registry), found)

    def collect(self, step: int) -> Mapping[str, Any]:
        """What was measured since the last call, packed for the driver.

        Of ranks that see the same tokens (sequence parallelism) one tells of them; each tells of its own gradients.
        Waits for the device: the actor has updated and is idle.
        """
        if self._taps is None:
            return {}
        tally = self._taps.take()
        if not _tells_of_tokens(self._worker.actor.engine):
            tally = StepTally({name: stat for name, stat in tally.stats.items() if isinstance(stat, Sharded)})
        parcel = {} if tally.empty else {"parcel": encoded(tally, step)}
        localised = self.localising.take(step) if isinstance(self.localising, Localising) else {}
        return {**parcel, **localised, "errors": self._seam.errors}

    def check(self, kind: str, args: Mapping[str, Any]) -> None:
        """Raise ``RLWatchError`` if this rank cannot carry out ``kind``."""
        self._handler(kind).check(Command("", "", kind, args))

    def do(self, kind: str, args: Mapping[str, Any]) -> Mapping[str, JSON]:
        """Carry it out."""
        return self._handler(kind)(Command("", "", kind, args))

    def kl_coef(self, value: float | None) -> float:
        """The coefficient of the KL term of the actor's loss, set to ``value`` if that is not None."""
        config = getattr(inspect.unwrap(self._worker.actor.loss_fn), "keywords", {}).get("config")
        if config is None or not getattr(config, "use_kl_loss", False):
            raise RLWatchError("the loss has no KL term (actor.use_kl_loss is false)")
        if value is not None:
            object.__setattr__(config, "kl_loss_coef", float(value))  # verl's configurations are frozen after set-up
        return float(config.kl_loss_coef)

    @property
    def vocab_size(self) -> int | None:
        """Tokens the policy chooses from."""
        actor = getattr(self._worker, "actor", None)
        return None if actor is None else vocab_size_of(unwrapped(actor.engine.module))

    @property
    def lowered_until(self) -> int:
        """The step until which the learning rate is lowered; 0 for none, or for good."""
        return self._paced().until

    def _handler(self, kind: str) -> CommandHandler:
        try:
            return self._handlers[kind]
        except KeyError:
            raise RLWatchError(f"a worker cannot do {kind!r}") from None

    def _paced(self) -> Paced:
        engine = self._worker.actor.engine
        return Paced([engine.optimizer], [engine.lr_scheduler])


def _tells_of_tokens(engine: Any) -> bool:
    """Whether this rank is the one of those that see the same tokens; each is, where the engine does not say."""
    first = getattr(engine, "is_mp_src_rank_with_outputs", None)
    return first is None or bool(first())


def _localising(worker: Any, seam: Seam, settings: Mapping[str, Any]) -> Localising | str | None:
    """What looks at spikes, as it is wished; or why it cannot."""
    wish = settings.get("localise")
    try:
        return None if wish is None else Localising.of(worker, seam, Localise(**wish), text=bool(settings.get("text")))
    except RLWatchError as reason:
        return str(reason)
