"""rlwatch inside one worker of verl: its measurements, the commands that it executes, and its part of the reference.

verl holds the reference as a second model in the same process, sharded like the policy. With LoRA the reference is the
base model, with the adapter disabled. Every rank copies, saves and restores its own shards and sends nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations import megatron
from rlwatch.integrations.commands import Settled, Timed
from rlwatch.integrations.compat import vocab_size_of
from rlwatch.integrations.held_updates import HoldUpdates, SkipStep
from rlwatch.integrations.learning_rate import LowerLR, Paced, RaiseLR
from rlwatch.integrations.level import Level
from rlwatch.integrations.localising import Localise
from rlwatch.integrations.reference import clear_state, clearable
from rlwatch.integrations.rollback import Rollback, RollbackMeans
from rlwatch.integrations.snapshot_state import Holdings
from rlwatch.integrations.snapshots import SnapshotKeeper, Snapshots, TakeTogether
from rlwatch.integrations.step_tally import StepTally, encoded_tally
from rlwatch.integrations.verl.compat import missing_of_actor, policy_losses
from rlwatch.integrations.verl.localise import RankLocalising
from rlwatch.integrations.verl.taps import WorkerTaps
from rlwatch.integrations.weights import (
    TensorPair,
    copy_all,
    fingerprint,
    flat_pairs,
    flat_resharded,
    flattened,
    gradients_of,
    local,
    model_pairs,
    plain_name,
    resharded,
    unwrapped,
)
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.tensors.gradnorm import GradNorms, ShardedNorm
from rlwatch.tensors.megatron import hindrance, model_norms
from rlwatch.tensors.weight_gap import UpdateSample


@dataclass(frozen=True, slots=True)
class Saving:
    """Settings of one rank's snapshots, with the run id and the rank for the names of their files."""

    settings: Snapshots | None = None
    run_id: str = ""
    rank: int = 0

    @classmethod
    def of(cls, worker: Any, settings: Mapping[str, Any]) -> Saving:
        """Read the settings that the driver sent to ``worker``."""
        wish = settings.get("snapshots")
        made = None if wish is None else Snapshots(**wish)
        return cls(made, str(settings.get("run_id", "")), int(worker.rank))

    def keeper(self, find: Callable[[], Holdings], error_boundary: ErrorBoundary) -> SnapshotKeeper | None:
        """Return the keeper that takes the snapshots which the driver plans; None if snapshots are off.

        ``find`` returns the objects to copy, ``error_boundary`` is the error boundary.
        """
        if self.settings is None:
            return None
        return SnapshotKeeper(self.settings, find, error_boundary, owner=lambda: (self.run_id, self.rank))


NOTHING_SAVED = Saving()


class Inside:
    """rlwatch's part in one worker of verl, which measures the actor and executes the driver's commands on this rank.

    The hooks that measure never raise into training. All other methods are called by the driver, and may raise
    ``RLWatchError`` as a refusal. ``error_boundary`` is the error boundary. ``taps`` are the hooks, or None if this
    worker has no actor.
    """

    def __init__(
        self,
        worker: Any,
        error_boundary: ErrorBoundary,
        taps: WorkerTaps | None,
        missing: Mapping[str, str],
        localising: RankLocalising | str | None = None,
        *,
        saving: Saving = NOTHING_SAVED,
    ) -> None:
        self.missing = missing
        """Measurement that is not possible here -> the reason."""
        self.localising = localising
        """Object that localises spikes of the gradient, or the reason why it is not possible; None if it is off."""
        self.anchor = Anchor(worker)
        self.keeper = Keeper(self.anchor, rank=int(worker.rank), world_size=int(worker.world_size))
        self._worker = worker
        self._error_boundary = error_boundary
        self.taps = taps
        self.step = 0
        """Number of the last step that has ended, as reported by the driver."""
        self._saving = saving
        hold: CommandHandler = HoldUpdates(self._optimizers, error_boundary, lambda: self.step, dict)
        keeper = saving.keeper(self.holdings, error_boundary)
        lower = LowerLR(self._paced, error_boundary)
        made: list[CommandHandler] = [
            lower,
            RaiseLR(lower, error_boundary),
            self.anchor,
            hold,
            SkipStep(self._optimizers, error_boundary),
        ]
        made.append(Rollback(keeper, RollbackMeans(lambda: self.step, self._paced)))
        made += [] if keeper is None else [TakeTogether(keeper)]
        self._handlers = {handler.kind: handler for handler in made}

    @classmethod
    def of(cls, worker: Any, settings: Mapping[str, Any]) -> Inside:
        """Create rlwatch's part in verl's ``worker`` and install the hooks that it supports, by the driver's
        ``settings``.
        """
        error_boundary, level = ErrorBoundary(), Level.of(str(settings.get("level", Level.FULL)))
        actor = getattr(worker, "actor", None)
        if actor is None:
            return cls(worker, error_boundary, None, {"measurements of the update": "this worker holds no actor"})
        localising, registry = _localising(worker, error_boundary, settings), policy_losses()
        taps = WorkerTaps(
            actor,
            registry,
            error_boundary,
            level,
            bypass=bool(settings.get("bypass")),
            truncation=settings.get("truncation"),
            gradients=_gradients(worker),
            weights=_weights(worker),
            localising=localising if isinstance(localising, RankLocalising) else None,
        )
        taps.attach()
        missing = missing_of_actor(actor, registry)
        layers = hindrance(actor.engine.module) if worker.config.actor.strategy == MEGATRON else None
        if layers is not None and level.includes(Level.GRADIENTS):
            missing["norms of layers"] = layers
        return cls(worker, error_boundary, taps, missing, localising, saving=Saving.of(worker, settings))

    def collect(self, step: int, *, before: bool = False) -> Mapping[str, Any]:
        """Return the measurements of ``step`` since the last call, encoded for the driver.

        ``before``: from now on also measure the policy before the update. Of ranks that see the same tokens (sequence
        parallelism) one reports them; each rank reports its own gradients. Waits for the device: the actor has updated
        and is idle.
        """
        if self.taps is None:
            return {}
        tally = self.taps.take(before=before)
        if not _tells_of_tokens(self._worker.actor.engine):
            tally = StepTally({name: stat for name, stat in tally.stats.items() if isinstance(stat, ShardedNorm)})
        parcel = {} if tally.empty else {"parcel": encoded_tally(tally, step)}
        localised = self.localising.take(step) if isinstance(self.localising, RankLocalising) else {}
        return {**parcel, **localised, "errors": self._error_boundary.errors}

    def check(self, kind: str, args: Mapping[str, Any], step: int = 0) -> None:
        """Raise ``RLWatchError`` if this rank cannot execute the command ``kind`` with ``args`` after ``step``."""
        self.step = step or self.step
        self._handler(kind).check(Command("", "", kind, args))

    def do(self, kind: str, args: Mapping[str, Any]) -> Mapping[str, JSON]:
        """Execute the command ``kind`` with ``args`` on this rank, and return its report."""
        return self._handler(kind)(Command("", "", kind, args))

    def settle(self, kind: str, args: Mapping[str, Any], refusal: str | None) -> None:
        """Keep the effect of a command if all ranks executed it (``refusal`` is None).

        Undo it if a rank refused or failed.
        """
        handler: Any = self._handler(kind)
        if isinstance(handler, Settled):
            handler.settled(Command("", "", kind, args), refusal)

    def due(self, kind: str, step: int) -> Mapping[str, JSON] | None:
        """Return the arguments of the command that ends the effect of ``kind`` after ``step``.

        The result is None if the effect continues.
        """
        self.step = step
        handler: Any = self._handler(kind)
        command = handler.due(step) if isinstance(handler, Timed) else None
        return None if command is None else dict(command.args)

    def holdings(self) -> Holdings:
        """Return the objects of this rank that a snapshot copies. Raises ``RLWatchError`` if they cannot be copied."""
        engine = self.anchor.policy
        strategy = str(self._worker.config.actor.strategy)
        if strategy != "fsdp2":
            raise RLWatchError(f"the actor is trained with {strategy!r}, whose optimizer rlwatch does not copy")
        synchronized()
        schedulers = [] if engine.lr_scheduler is None else [engine.lr_scheduler]
        return Holdings(engine.module, [engine.optimizer], schedulers, getattr(engine, "scaler", None))

    def _optimizers(self) -> list[Any]:
        return [self.anchor.policy.optimizer]

    def kl_coef(self, value: float | None) -> float:
        """Set the coefficient of the KL term in the actor's loss to ``value``, unless it is None.

        Return the coefficient. Raises ``RLWatchError`` if the loss has no KL term.
        """
        config = getattr(inspect.unwrap(self._worker.actor.loss_fn), "keywords", {}).get("config")
        if config is None or not getattr(config, "use_kl_loss", False):
            raise RLWatchError("the loss has no KL term (actor.use_kl_loss is false)")
        if value is not None:
            object.__setattr__(config, "kl_loss_coef", float(value))  # verl's configurations are frozen after set-up
        return float(config.kl_loss_coef)

    @property
    def vocab_size(self) -> int | None:
        """Return the size of the model's vocabulary, or None if it is unknown."""
        actor = getattr(self._worker, "actor", None)
        return None if actor is None else vocab_size_of(unwrapped(actor.engine.module))

    @property
    def lowered_until(self) -> int:
        """Return the step until which the learning rate is lowered; 0 if it is not lowered, or permanently."""
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
    """Return True on the first of the ranks that see the same tokens; on all if the engine does not know them."""
    first = getattr(engine, "is_mp_src_rank_with_outputs", None)
    return first is None or bool(first())


def _gradients(worker: Any) -> Callable[[Any], GradNorms | None] | None:
    """Return a function that reads gradient norms by layer from the actor's engine; None if its strategy hides them."""
    strategy, rank = str(worker.config.actor.strategy), int(worker.rank)
    if strategy == MEGATRON:
        return lambda engine: model_norms(engine.module, rank=rank)
    return (lambda engine: gradients_of(engine.module, rank)) if strategy in ENGINES else None


def _weights(worker: Any) -> Callable[[Any, int], UpdateSample | None] | None:
    """Return a function that samples the weights of the actor's engine before step ``turn``; None if its strategy hides
    them.
    """
    rank = int(worker.rank)
    if str(worker.config.actor.strategy) not in ENGINES:
        return None
    return lambda engine, turn: UpdateSample.of(engine.module.named_parameters(), turn, rank=rank)


def _localising(worker: Any, error_boundary: ErrorBoundary, settings: Mapping[str, Any]) -> RankLocalising | str | None:
    """Return the localiser for these settings, the reason why it is not possible, or None if it is off."""
    wish = settings.get("localise")
    try:
        return (
            None
            if wish is None
            else RankLocalising.of(worker, error_boundary, Localise(**wish), text=bool(settings.get("text")))
        )
    except RLWatchError as reason:
        return str(reason)


# The reference policy of one worker, and its reset to the policy.

ENGINES = ("fsdp", "fsdp2")
"""verl's strategies with one wrapped model, whose shards can be copied one to one and whose gradients can be read by
layer.
"""
MEGATRON = "megatron"
"""verl's strategy whose models are lists of chunks, divided over ranks."""


class Anchor:
    """Handler of the command ``reset-reference`` on one rank. ``worker`` is verl's ``ActorRolloutRefWorker``."""

    kind: str = "reset-reference"

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.adapter: FrozenAdapter | None = None

    @property
    def policy(self) -> Any:
        """Return the actor's engine, which holds the policy.

        Raises ``RLWatchError`` if rlwatch cannot copy its weights.
        """
        actor = self._worker.actor
        if actor is None:
            raise RLWatchError("this worker holds no actor")
        strategy = str(self._worker.config.actor.strategy)
        if strategy not in (*ENGINES, MEGATRON):
            raise RLWatchError(f"the actor is trained with {strategy!r}, whose weights rlwatch does not copy")
        return actor.engine

    @property
    def _megatron(self) -> bool:
        return str(self._worker.config.actor.strategy) == MEGATRON

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if the reference cannot be reset on this rank."""
        if COMMAND_KINDS[self.kind].read(command.args)["optimizer"] == "clear":
            clearable([self.policy.optimizer])
        synchronized()
        if self.lora:
            FrozenAdapter.of(self.policy).check()
        else:
            self.pairs()

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Reset the reference on this rank and return a report with the number of tensors, the fingerprint and the
        cleared states.
        """
        optimizer = COMMAND_KINDS[self.kind].read(command.args)["optimizer"]
        synchronized()
        report = self._freeze() if self.lora else self._copy()
        cleared = clear_state([self.policy.optimizer]) if optimizer == "clear" else 0
        return {**report, "optimizer": optimizer, "cleared": cleared}

    @property
    def lora(self) -> bool:
        """Return True if the reference is the policy without its LoRA adapter."""
        return self._worker.ref is None and bool(getattr(self.policy, "_is_lora", False))

    def pairs(self) -> list[TensorPair]:
        """Return pairs of this rank's tensors of policy and reference.

        Raises ``RLWatchError`` if there is no reference, or if the two are sharded differently.
        """
        ref = self._worker.ref
        if ref is None and self._megatron and getattr(self.policy, "peft_cls", None) is not None:
            raise RLWatchError("the reference is Megatron's model without its adapter, in whose place none can be put")
        if ref is None:
            raise RLWatchError(
                "there is no reference: neither actor.use_kl_loss nor algorithm.use_kl_in_reward is set, "
                "or it is held by another worker"
            )
        policy, reference = self.policy.module, ref.engine.module
        if self._megatron:
            return megatron.pairs(policy, reference)
        pairs = (flat_pairs if flattened(policy) else model_pairs)(policy, reference)
        for name, policy_tensor, reference_tensor in pairs:
            if local(policy_tensor).shape != local(reference_tensor).shape:
                raise RLWatchError(f"{name!r} is sharded differently in the policy and in the reference")
        return pairs

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards of the reference by name; they share its memory."""
        synchronized()
        if self.lora:
            return FrozenAdapter.of(self.policy).kept
        return {pair.name: local(pair.reference) for pair in self.pairs()}

    def _copy(self) -> dict[str, JSON]:
        pairs = self.pairs()
        copy_all(pairs)
        exact = all(torch.equal(local(p.reference), local(p.policy).to(local(p.reference))) for p in pairs)
        return {"tensors": len(pairs), "fingerprint": fingerprint(local(p.reference) for p in pairs), "exact": exact}

    def _freeze(self) -> dict[str, JSON]:
        adapter = FrozenAdapter.of(self.policy)
        adapter.freeze()
        kept = list(adapter.kept.values())
        return {"tensors": len(kept), "fingerprint": fingerprint(kept), "exact": True, "adapter": True}


def synchronized() -> None:
    """Wait for copies to and from the device that offloading may have in progress.

    The CPU must not read the tensors before.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# LoRA in verl: the reference is the base model, reached by disabling the adapter.
#
# After a reset the reference is a copy of the adapter. The copy is kept outside the model: another adapter would
# change the model's state, and its checkpoints would not load into a fresh process. Where verl disables the adapter,
# the copied weights replace the trained ones for that forward pass. Afterwards the trained ones are written back, bit
# for bit.

HELD = "rlwatch_frozen_adapter"


class FrozenAdapter:
    """Reference of a LoRA policy: a copy of this rank's shards of the adapter in ``kept``, by name; empty before a
    reset.

    ``engine`` is verl's engine of the policy.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.kept: dict[str, Tensor] = {}

    @classmethod
    def of(cls, engine: Any) -> FrozenAdapter:
        """Return the frozen adapter of verl's ``engine``, created at the first call."""
        held = getattr(engine, HELD, None)
        if held is None:
            held = cls(engine)
            setattr(engine, HELD, held)
        return held

    def trained(self) -> dict[str, Tensor]:
        """Return this rank's shards of all trained parameters by name; they share the model's memory."""
        model = unwrapped(self._engine.module)
        model = flat_resharded(model) if flattened(model) else resharded(model)
        return {plain_name(name): local(p) for name, p in model.named_parameters() if p.requires_grad}

    def check(self) -> None:
        """Raise ``RLWatchError`` if the policy has no trained adapter, or if its weights are not finite."""
        trained = self.trained()
        if not trained:
            raise RLWatchError("the policy has no trained adapter")
        for name, tensor in trained.items():
            if not bool(tensor.isfinite().all()):
                raise RLWatchError(f"the policy's {name!r} is not finite: roll back to a checkpoint instead")

    def freeze(self) -> None:
        """Copy the trained adapter and use the copy as the reference from now on."""
        self.hold({name: tensor.detach().clone() for name, tensor in self.trained().items()})

    def hold(self, weights: dict[str, Tensor]) -> None:
        """Use ``weights`` (name -> shard) as the reference from now on."""
        self.kept = weights
        self._engine.disable_adapter = self.in_place

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute as the reference during the ``with`` block, then restore the trained weights."""
        trained = self.trained()
        live = {name: tensor.detach().clone() for name, tensor in trained.items()}
        try:
            _write(trained, self.kept)
            yield
        finally:
            _write(self.trained(), live)


def _write(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.detach().copy_(source[name])


# The reference on disk: verl saves only the actor (and critic), so that a reset would be lost with the process.
#
# Each rank writes its own shards next to the actor's, and reads them only into the same sharding.


class Keeper:
    """Writer and reader of one rank's part of the reference on disk.

    ``anchor`` gives access to the reference; ``rank`` and ``world_size`` name the file.
    """

    def __init__(self, anchor: Anchor, *, rank: int, world_size: int) -> None:
        self._anchor = anchor
        self._file = f"world_size_{world_size}_rank_{rank}.pt"

    def save(self, directory: str) -> str:
        """Write this rank's part of the reference into ``directory``, completely or not at all.

        Return the path of the file. Raises ``RLWatchError`` if the reference was never reset, and ``OSError`` if the
        file cannot be written.
        """
        tensors = self._anchor.tensors()
        if not tensors:
            raise RLWatchError("the reference was never reset")
        path = Path(directory) / self._file
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        try:
            torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return str(path)

    def forget(self, directory: str) -> None:
        """Delete this rank's part of the reference from ``directory`` if it is there, and the directory once it is
        empty.
        """
        path = Path(directory) / self._file
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()

    def find(self, directory: str) -> str | None:
        """Return the fingerprint of this rank's part of the reference in ``directory``, or None if there is none.

        Raises ``RLWatchError`` if the saved reference belongs to another number of ranks or another model.
        """
        if not (Path(directory) / self._file).exists():
            if any(Path(directory).glob("*.pt")):
                raise RLWatchError(f"{directory} holds a reference of another number of ranks: no {self._file}")
            return None
        return fingerprint(self._fitting(directory).values())

    def restore(self, directory: str) -> dict[str, Any]:
        """Restore this rank's part of the reference from ``directory``.

        Return a report with the number of tensors and the fingerprint. Raises ``RLWatchError`` if it belongs to another
        model.
        """
        saved = self._fitting(directory)
        if self._anchor.lora:
            FrozenAdapter.of(self._anchor.policy).hold(saved)
        else:
            with torch.no_grad():
                for name, tensor in self._anchor.tensors().items():
                    tensor.copy_(saved[name])
        return {"tensors": len(saved), "fingerprint": fingerprint(saved.values())}

    def _fitting(self, directory: str) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = torch.load(Path(directory) / self._file, map_location="cpu", weights_only=True)
        held = self._holders()
        odd = sorted(saved.keys() ^ held.keys()) or [n for n, x in saved.items() if x.shape != held[n].shape]
        if odd:
            raise RLWatchError(f"the reference in {directory} is of another model: {odd[0]!r} does not fit")
        return saved

    def _holders(self) -> dict[str, Tensor]:
        """Return the tensors that the saved ones are restored into or replace."""
        if self._anchor.lora:
            synchronized()
            return FrozenAdapter.of(self._anchor.policy).trained()
        return self._anchor.tensors()
