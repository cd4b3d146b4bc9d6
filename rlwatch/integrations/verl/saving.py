"""Commands ``rollback``, ``hold`` and ``skip-step``, and snapshots, in verl: the driver decides, and every worker acts.

A worker keeps snapshots of the shards that it trains. The driver plans when a snapshot is taken, knows which are good,
and calls all workers in phases: each checks, each acts, and each keeps the result only if all succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlwatch.control.commands import COMMAND_KINDS, ROLLBACK, TAKE_SNAPSHOT
from rlwatch.error_boundary import ErrorBoundary
from rlwatch.errors import RLWatchError
from rlwatch.integrations.commands import REWARD, OnMetrics
from rlwatch.integrations.rollback import NO_SNAPSHOTS, UNDONE, chosen
from rlwatch.integrations.snapshot_state import Holdings
from rlwatch.integrations.snapshots import Snapshot, SnapshotKeeper, SnapshotPlan, Snapshots, TakeTogether
from rlwatch.integrations.verl.commands import OnWorkers
from rlwatch.integrations.verl.ranks import Workers, accepted, joint
from rlwatch.ports import CommandHandler
from rlwatch.records import JSON, Command
from rlwatch.wording import number

WhenMeasured = Callable[[int, OnMetrics], None]


class SnapshotLedger(SnapshotKeeper):
    """The driver's list of the snapshots that its workers hold: the step of each, and whether it is good."""

    def __init__(self, settings: Snapshots, workers: Workers, error_boundary: ErrorBoundary) -> None:
        super().__init__(settings, _elsewhere, error_boundary)
        self._workers = workers
        self._size = 0

    def begin(self, step: int) -> None:
        """Drop the snapshots after ``step``, and let all workers take the first one of this training."""
        self.forget_after(step - 1)
        self._last = None
        together = TakeTogether(self)
        command = together.due(step)
        if command is not None:
            together.check(command)
            together(command)
            together.settled(command, None)

    def allows(self, plan: SnapshotPlan) -> None:
        """Ask all workers if they can take the snapshot of ``plan``. Raises ``RLWatchError`` if one cannot."""
        self._planned_at = self._seconds()
        accepted(self._workers.call("check", TAKE_SNAPSHOT, plan.plain(), plan.step))

    def carry_out(self, plan: SnapshotPlan) -> None:
        """Let all workers take the snapshot of ``plan``. Raises ``RLWatchError`` if one fails."""
        first = not self.taken
        for one in [one for one in self.taken if one.step not in plan.keep]:
            self._drop(one)
        accepted(self._workers.call("do", TAKE_SNAPSHOT, plan.plain()))
        self._made = Snapshot(plan.step, None)
        self.taken.append(self._made)
        self.taken.sort(key=lambda one: one.step)
        if first:
            self._tell(plan.step, 0)

    def settled(self, plan: SnapshotPlan, refusal: str | None) -> None:
        """Keep the snapshot of ``plan`` here and on all workers if all took it (``refusal`` is None), else drop it."""
        super().settled(plan, refusal)
        accepted(self._workers.call("settle", TAKE_SNAPSHOT, plan.plain(), refusal))

    def _needed(self) -> int:
        return 0  # each worker looks after its own memory

    def _write_good(self) -> None:
        """Do nothing, because the workers write their snapshots."""

    @property
    def _together(self) -> bool:
        return True


def _elsewhere() -> Holdings:
    raise RLWatchError("weights and optimizer are with the workers")


class RollbackOnWorkers:
    """Handler of the command ``rollback`` in verl: every worker restores its shards, and keeps the result only if all
    could.

    verl sends the weights to its rollout engine when the step ends, after commands. So the next batch is sampled with
    the restored weights, and no batch waits in its queue. ``ledger`` lists the snapshots (None: none are kept).
    ``step`` returns the step that has ended.
    """

    kind: str = ROLLBACK

    def __init__(self, ledger: SnapshotLedger | None, workers: Workers, step: Callable[[], int]) -> None:
        self._ledger = ledger
        self._workers = workers
        self._step = step
        self._restored: tuple[int, int] | None = None
        self._open: tuple[Snapshot, int] | None = None

    def last_good(self) -> int | None:
        """Return the step of the newest snapshot that was judged good, or None."""
        return None if self._ledger is None else self._ledger.newest_good()

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` if there is no such snapshot, or if it cannot be restored on a worker."""
        snapshot = self._chosen(command)
        accepted(self._workers.call("check", self.kind, {"to": snapshot.step}, self._step()))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Restore the snapshot on every worker, and return a report with a ``summary``."""
        snapshot, step = self._chosen(command), self._step()
        self._open = snapshot, step
        replies = accepted(self._workers.call("do", self.kind, {"to": snapshot.step}))
        reports = [reply["report"] for reply in replies]
        known = "good" if snapshot.good else snapshot.why_not
        summary = (
            f"weights and optimizer on {len(replies)} ranks are those after step {snapshot.step} ({known}); "
            f"undone: steps {snapshot.step + 1} to {step}; `rollback --to {step}` takes this back; the rollout engine "
            "gets the weights before it samples"
        )
        prints = joint([str(report["fingerprint"]) for report in reports])
        return {**reports[0], "good": snapshot.good, "fingerprint": prints, "ranks": len(replies), "summary": summary}

    def settled(self, command: Command, refusal: str | None) -> None:  # noqa: ARG002  (the signature of the port)
        """Make the roll-back final on every worker if all succeeded (``refusal`` is None), else undo it on every
        worker.
        """
        done, self._open = self._open, None
        if done is None or self._ledger is None:
            return
        snapshot, step = done
        accepted(self._workers.call("settle", self.kind, {"to": snapshot.step}, refusal))
        if refusal is None:
            self._ledger.rolled_back(snapshot, Snapshot(step, None, good=False, why_not=UNDONE))
            self._restored = step, snapshot.step

    def _chosen(self, command: Command) -> Snapshot:
        if self._ledger is None:
            raise RLWatchError(NO_SNAPSHOTS)
        return chosen(self._ledger, command, self._step(), self._restored)


class UntilDue(OnWorkers):
    """Handler of a command that lasts for some steps on every worker; the worker of rank 0 knows when it ends.

    ``kind`` is the command, ``ends`` the argument that is 0 in the command that ends it. ``step`` returns the step that
    has ended.
    """

    def __init__(self, kind: str, ends: str, workers: Workers, step: Callable[[], int]) -> None:
        super().__init__(kind, workers)
        self._ends = ends
        self._step = step
        self._active = False

    def check(self, command: Command) -> None:
        """Raise ``RLWatchError`` with the reason if a rank refuses."""
        accepted(self._workers.call("check", self.kind, dict(command.args), self._step()))

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin or end the effect of the command on every worker, and return rank 0's report."""
        report = super().__call__(command)
        self._active = bool(COMMAND_KINDS[self.kind].read(command.args)[self._ends])
        return report

    def due(self, step: int) -> Command | None:
        """Return the command that ends the effect of this handler's command after ``step``, once its steps are over,
        else None.
        """
        if not self._active:
            return None
        replies = accepted(self._workers.call("due", self.kind, step))
        args = next((reply["due"] for reply in replies if reply["due"] is not None), None)
        return None if args is None else Command("", "", self.kind, args, requested_by="rlwatch", why="it is over")


class HoldOnWorkers(UntilDue):
    """Handler of the command ``hold`` in verl: workers sample batches with unchanged weights.

    A batch's reward is known when its step is recorded, so that the reward of the last batch comes too late for the
    report. ``when_measured`` calls back with the metrics of a step.
    """

    def __init__(self, workers: Workers, step: Callable[[], int], when_measured: WhenMeasured) -> None:
        super().__init__("hold", "batches", workers, step)
        self._when_measured = when_measured
        self._rewards: list[float] = []

    def __call__(self, command: Command) -> Mapping[str, JSON]:
        """Begin a hold, or end it and return a report with the rewards that were measured."""
        report = super().__call__(command)
        if self._active:
            self._rewards = []
            return report
        rewards = list(self._rewards)
        rewards_part = f"; reward {', '.join(map(number, rewards))}, before the last batch" if rewards else ""
        summary = str(report.get("summary", "")).partition(";")[0]
        return {**report, "rewards": list[JSON](rewards), "summary": f"{summary}{rewards_part}"}

    def due(self, step: int) -> Command | None:
        """Return the command that ends the hold after ``step``, once its batches are sampled, else None.

        The reward of the batch is also requested.
        """
        if self._active and step > 0:
            self._when_measured(step, self._measured)
        return super().due(step)

    def _measured(self, metrics: Mapping[str, float]) -> None:
        if REWARD in metrics:
            self._rewards.append(metrics[REWARD])


def saving_handlers(
    ledger: SnapshotLedger | None, workers: Workers, step: Callable[[], int], when_measured: WhenMeasured
) -> list[CommandHandler]:
    """Return the handlers of ``rollback``, ``hold`` and ``skip-step``, and of taking snapshots if ``ledger`` is not
    None.

    ``ledger`` is the driver's list of snapshots. ``workers`` makes remote calls to all ranks. ``step`` returns the step
    that has ended, ``when_measured`` calls back with the metrics of a step.
    """
    made: list[CommandHandler] = [
        RollbackOnWorkers(ledger, workers, step),
        HoldOnWorkers(workers, step, when_measured),
        UntilDue("skip-step", "steps", workers, step),
    ]
    return made if ledger is None else [*made, TakeTogether(ledger)]


def ledger_of(
    settings: Mapping[str, Any] | None, workers: Workers, error_boundary: ErrorBoundary
) -> SnapshotLedger | None:
    """Return the driver's list of snapshots, or None if ``settings`` is None (snapshots are off).

    ``settings`` are fields of :class:`~rlwatch.integrations.snapshots.Snapshots`; ``error_boundary`` is the error
    boundary.
    """
    return (
        None
        if settings is None
        else SnapshotLedger(replace(Snapshots(**settings), where=None), workers, error_boundary)
    )
