"""Handler of the command ``rollback``, which restores the weights and optimizer of a snapshot during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rlwatch.control.commands import COMMAND_KINDS, LAST_GOOD, ROLLBACK
from rlwatch.error_boundary import Reported
from rlwatch.errors import RLWatchError
from rlwatch.integrations.learning_rate import Pace, Paced
from rlwatch.integrations.snapshot_state import StateCopy
from rlwatch.integrations.snapshots import Snapshot, SnapshotKeeper
from rlwatch.integrations.weights import fingerprint
from rlwatch.records import JSON, Command

NO_SNAPSHOTS = (
    "no snapshots are kept: give snapshots=True to watch() or Watcher() at the next start; of this run, a checkpoint "
    "from before the failure can be resumed"
)
UNDONE = "undone by a roll-back"


@dataclass(frozen=True, slots=True)
class RollbackMeans:
    """Functions by which a roll-back reads and changes the trainer.

    Attributes
    ----------
    step
        Returns the number of the step that has ended.
    paced
        Returns optimizers and schedulers, so that a learning rate lowered by a command stays lowered.
    drop
        Drops rollouts that wait to be trained on, and makes the rollout engine load the weights again. Receives the
        step of the restored snapshot. Returns a message, "" if there was nothing to drop.
    """

    step: Callable[[], int]
    paced: Callable[[], Paced]
    drop: Callable[[int], str] = lambda _step: ""


def chosen(keeper: SnapshotKeeper, command: Command, step: int, restored: tuple[int, int] | None) -> Snapshot:
    """Return the snapshot to which ``command`` asks to return, after ``step`` has ended.

    ``keeper`` has the snapshots. ``restored``: the step of the last roll-back and the step of the state that it
    restored, or None. Raises ``RLWatchError`` if there is no such snapshot, or if the trainer is in that state already.
    """
    to = COMMAND_KINDS[ROLLBACK].read(command.args)["to"]
    snapshot = keeper.find(str(to))
    if restored == (step, snapshot.step):
        raise RLWatchError(f"the state of step {snapshot.step} was put back at this very step")
    if snapshot.step == step and snapshot.why_not != UNDONE:
        raise RLWatchError(f"the state is that of step {step} already")
    return snapshot


class Rollback:
    """Handler of the command ``rollback`` with ``{"to": t}``, where t is ``"last-good"`` or the step of a snapshot.

    Weights, optimizer, schedule and loss scale are restored bit for bit. The state before the roll-back is kept as the
    snapshot of the current step, so that ``rollback --to`` that step undoes it. The reference, the KL coefficient, the
    trainer's step counter and the random generators are not restored: the same samples would fail in the same way.
    Either everything changes, on all ranks, or nothing.

    ``keeper`` has the snapshots, None if none are kept. ``means`` reads and changes the trainer.
    """

    kind: str = ROLLBACK

    def __init__(self, keeper: SnapshotKeeper | None, means: RollbackMeans) -> None:
        self._keeper = keeper
        self._means = means
        self._restored: tuple[int, int] | None = None
        self._open: tuple[Snapshot, Snapshot, Pace] | None = None

    def resolved(self, command: Command) -> Command:
        """Return ``command`` with ``last-good`` replaced by the step of the last good snapshot, which only rank 0
        knows.
        """
        to = COMMAND_KINDS[self.kind].read(command.args)["to"]
        good = self.last_good() if to == LAST_GOOD else None
        return command if good is None else replace(command, args={"to": good})

    def last_good(self) -> int | None:
        """Return the step of the newest snapshot that was judged good, or None."""
        return None if self._keeper is None else self._keeper.newest_good()

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if no snapshots are kept, if there is none as requested, or if it cannot be
        restored.
        """
        keeper = self._kept()
        keeper.fits(self._chosen(keeper, command))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Restore the snapshot and return a report. :meth:`settled` makes the roll-back final, or undoes it."""
        keeper, step = self._kept(), self._means.step()
        snapshot = self._chosen(keeper, command)
        kept = keeper.fits(snapshot)
        before = keeper.now(step)
        paced = self._means.paced()
        pace = paced.pace
        keeper.put_back(kept, before.state(), generators=False)
        with Reported(lambda _error: keeper.put_back(before.state(), before.state(), generators=False)):
            paced.resume(pace)
            dropped = self._means.drop(snapshot.step)
        before.good, before.why_not = False, UNDONE
        self._open = snapshot, before, pace
        return self._report(snapshot, kept, step, dropped)

    def settled(self, command: Command, refusal: str | None) -> None:  # noqa: ARG002  (the signature of the port)
        """Make the roll-back final if all ranks succeeded (``refusal`` is None), else restore the state before it.

        When final, the state before the roll-back is kept as the snapshot of its step.
        """
        done, self._open = self._open, None
        if done is None:
            return
        keeper, (snapshot, before, pace) = self._kept(), done
        if refusal is None:
            keeper.rolled_back(snapshot, before)
            self._restored = (before.step, snapshot.step)
            return
        keeper.put_back(before.state(), before.state(), generators=False)
        self._means.paced().resume(pace)
        self._means.drop(before.step)

    def _kept(self) -> SnapshotKeeper:
        if self._keeper is None:
            raise RLWatchError(NO_SNAPSHOTS)
        return self._keeper

    def _chosen(self, keeper: SnapshotKeeper, command: Command) -> Snapshot:
        return chosen(keeper, command, self._means.step(), self._restored)

    @staticmethod
    def _report(snapshot: Snapshot, kept: StateCopy, step: int, dropped: str) -> Mapping[str, JSON]:
        weights = [tensor for name, tensor in kept.tensors.items() if name.startswith("model/")]
        known = "good" if snapshot.good else snapshot.why_not
        summary = f"weights and optimizer are those after step {snapshot.step} ({known}); undone: steps " + (
            f"{snapshot.step + 1} to {step}; `rollback --to {step}` takes this back{dropped and f'; {dropped}'}"
        )
        return {
            "to_step": snapshot.step,
            "from_step": step,
            "good": snapshot.good,
            "tensors": len(weights),
            "fingerprint": fingerprint(weights),
            "summary": summary,
            "undo": {"kind": ROLLBACK, "args": {"to": step}},
        }
