"""A policy that saves a failing run: probe, restore, decide, remove the cause, go on.

It is off unless ``[[rescue]]`` of ``rlwatch.toml`` permits it. A rescue is a state machine over the run's boundaries
(the points between updates at which commands may be executed). It is causal and deterministic: its decisions depend on
measurements and results so far, never on time. At each boundary it gives at most one command, which is treated like
every command: all ranks vote, no veto is forced, and the event names the policy and its reason.

1. An alert fires. Updates are held while batches are sampled with the **current** weights. If their reward is not worse
   than before, it was a false alarm and training goes on; or, where the engine or the entropy is at fault, the cause is
   removed without going back.
2. The last good snapshot is restored, and batches are sampled with the **restored** weights.
3. If their reward is back, the fault lies in the optimisation, and its cause is removed: a setting that changed during
   the run and that the diagnosis names is set back to its value before, or else the cause is removed by the kind of
   the alert. Then updates go on. Where nothing can set the setting back, they stay held until a person does. If the
   reward is not back, the fault lies outside (reward, verifier, data, engine): updates stay held until it is, and a
   person is needed.
   The same applies, without a restore, while a known answer is scored differently (``verifier_changed``): then no
   reward can judge the weights.
4. After quiet steps the learning rate is raised again, but not above the value that it was set back to. A failure
   after ``most`` rescues restores and stops.

Measured by others on toy runs: 16 of 16 saved on fresh seeds (docs/diagnosis.md); a rollback without removing the cause
saved 1 of 14; removing the cause without a rollback saved no run whose policy was dead.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import sub
from statistics import median

from rlwatch.catalogue import kinds
from rlwatch.control.commands import LAST_GOOD, NONFINITE, ROLLBACK, SKIP_STEP
from rlwatch.control.policy import COLLAPSE_KINDS, KL_COEF, REQUESTED_BY, ROWS_KEPT, NamedSetting, RunHealth
from rlwatch.errors import ConfigError
from rlwatch.records import JSON, Alert, Command, Finding, JudgedRow, Severity
from rlwatch.wording import number

RESCUE_EVENT = "rescue"
"""Kind of the events that record a rescue: what was done, why, and the measurements before and after."""
FIRST_UPDATES = "first_updates"
"""Kind of a failure that a learning rate too high from the start causes."""
NEAR = 0.85
"""Fraction of its earlier level that a reward must reach to count as back."""
HELD = 1_000_000
"""Largest number of batches for which updates are held."""
MISMATCH_KINDS = frozenset({"mismatch_growth"})
DRIFT_KINDS = frozenset(name for name, kind in kinds().items() if kind.drifts)
"""Kinds of findings that, while active, show that the engine does not sample from the trainer's weights."""
VERIFIER_KINDS = frozenset({"verifier_changed"})
"""Kinds of findings that, while critical, mean that the reward cannot judge the weights: the fault lies outside the
policy.
"""
EXPLODING_KINDS = frozenset({"entropy_explosion"})
UNREWARDED = 2
"""Number of rewards that are overdue after which the rescue waits for no more. One is due with each batch, and a batch
may be trained on for several steps."""
BEYOND = 10.0
"""Spreads by which a reward is above all earlier ones, and at least twice as high, if its function is another now."""
STRANGE = "the reward is far above every earlier one while the run collapses, so its function seems to have changed"
"""Reason for which a reward that rose is not taken for a good one."""
STRANGE_AGAIN = "good weights now earn far more than they did, so the function that gives the reward has changed"
"""The same reason, with the restored weights."""
MANY_NATS = 1.25
"""Ratio of the entropy to its start from which on a fall of the reward is attributed to an explosion of the entropy."""
LOWER_LR = "lower-lr"
RATE = "optim/lr"
SET_BACK: Mapping[str, str] = {
    RATE: LOWER_LR, KL_COEF: "set-kl-coef", "policy/entropy_coef": "set-entropy-coef", "policy/clip_range": "set-clip",
}  # fmt: skip
"""Metric that is a setting -> the command that sets it."""
SAME = 0.02
"""Relative difference up to which a setting has the value that it was set to."""
SETTLES = 2
"""Steps after a command from which the measured value of its setting is the new one."""
INSISTS = 10
"""Times that a setting is set back again, where the trainer itself goes on changing it."""
RAISE = 3.0
"""Factor by which the learning rate is raised after quiet steps."""


@dataclass(frozen=True, slots=True)
class RescuePolicy:
    """Permission to save a failing run, as ``[[rescue]]`` of the owner's ``rlwatch.toml`` gives it.

    Parameters
    ----------
    name
        Part of the name under which commands are requested: ``policy:NAME``.
    kinds
        Kinds of critical alerts that begin a rescue; by default those that mean a collapse.
    probe
        Number of batches that are sampled to judge weights, an integer >= 1.
    scale
        Fraction of the learning rate after a fall of the reward, in (0, 1].
    mild_scale
        Fraction of the learning rate after a mismatch, or an entropy that exploded, in (0, 1].
    cooldown_steps
        Number of steps after a rescue in which no other begins, an integer >= 0.
    quiet_steps
        Number of quiet steps after which the learning rate is raised again, an integer >= 1.
    most
        Largest number of rescues in the life of the process, without false alarms and faults outside; a failure after
        them restores and stops. An integer >= 1.
    skip_nonfinite
        From the start, leave out every update whose gradient is NaN or infinite.
    dry_run
        Only record what would have been done.

    Raises
    ------
    ConfigError
        For a value out of range, or a kind that no critical alert of a collapse has.
    """

    name: str = "rescue"
    kinds: tuple[str, ...] = tuple(sorted(COLLAPSE_KINDS))
    probe: int = 2
    scale: float = 0.1
    mild_scale: float = 0.3
    cooldown_steps: int = 30
    quiet_steps: int = 50
    most: int = 2
    skip_nonfinite: bool = False
    dry_run: bool = True

    def __post_init__(self) -> None:
        for what, least in (("probe", 1), ("cooldown_steps", 0), ("quiet_steps", 1), ("most", 1)):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"rescue {self.name!r}: {what} must be an integer of at least {least}, got {value!r}")
        for what in ("scale", "mild_scale"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"rescue {self.name!r}: {what} must be above 0 and at most 1, got {value!r}")
        odd = sorted(set(self.kinds) - COLLAPSE_KINDS)
        if not self.name or not self.kinds or odd:
            which = f"{odd[0]!r} is no collapse" if odd else "needs a name, and kinds: at least one"
            raise ConfigError(f"rescue {self.name!r}: {which}; known: {', '.join(sorted(COLLAPSE_KINDS))}")

    @property
    def by(self) -> str:
        """Name under which the commands of this policy are requested."""
        return f"{REQUESTED_BY}{self.name}"

    def alarm(self, health: RunHealth) -> Alert | None:
        """Return the first firing alert that is critical and of a kind that begins a rescue (attempt to save the run);
        None without any.
        """
        return next((a for a in health.alerts if a.severity is Severity.CRITICAL and a.kind in self.kinds), None)


class Stage(StrEnum):
    """Stages of a rescue (attempt to save a failing run by commands), from watching to its end."""

    WATCHING = "watching"
    PROBING = "probing the current weights"
    RESTORED = "probing the restored weights"
    MENDING = "removing the cause"
    OUTSIDE = "held: the fault lies outside the policy"
    FROZEN = "held: a setting that broke the run cannot be set back"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Move:
    """A command that a rescue (attempt to save a failing run) is to send.

    ``do``, ``args``: kind and arguments of the command. ``why``: its reason.
    """

    do: str
    args: Mapping[str, JSON]
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """An entry in the record of a rescue (attempt to save a failing run): the step, the stage, a reason, and the
    measurements behind it.
    """

    step: int
    stage: Stage
    why: str
    evidence: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(slots=True)
class KeptSetting:
    """A setting that a rescue (attempt to save a failing run) changed back to an earlier value.

    ``move``: command that changed it. ``value``: its value since. ``at``: step of the change. ``left``: number of times
    that the command may be sent again.
    """

    move: Move
    value: float
    at: int
    left: int = INSISTS


@dataclass(slots=True)
class BeforeAlarm:
    """Values of the run at its newest alarm.

    ``level``, ``spread``: median and spread of the reward before it, in its unit. ``entropy``: the policy's. ``good``:
    step of the newest good snapshot. None where a value is not known. ``top``: highest level of a sound row.
    ``every``: steps from one reward to the next.
    """

    level: float | None = None
    spread: float = 0.0
    entropy: float | None = None
    good: int | None = None
    top: float | None = None
    every: int = 1


@dataclass(slots=True)
class RateLimits:
    """Multiple of the trainer's learning rate: now, and at most; and the step of its last change."""

    scale: float = 1.0
    ceiling: float = 1.0
    changed_at: int = 0


class RescueCourse:
    """Rescues of one failing run: decides after each step whether to send a command, such as a rollback. Used on rank
    0.

    Parameters
    ----------
    policy
        Permission to save the run, with limits.
    last_good
        Returns the step of the newest snapshot that is known to be good; None if there is none.
    values
        Returns the arguments of a command as they are set now; none where they cannot be read.
    skipped
        Returns how many updates were left out so far because their gradient was not finite.
    """

    def __init__(
        self,
        policy: RescuePolicy,
        last_good: Callable[[], int | None],
        *,
        values: Callable[[str], Mapping[str, JSON]] = lambda _kind: {},
        skipped: Callable[[], int] = lambda: 0,
    ) -> None:
        self.policy = policy
        self.stage = Stage.WATCHING
        self.notes: deque[Note] = deque()
        """Entries of the ledger that are not taken yet."""
        self._last_good = last_good
        self._values = values
        self._skipped = skipped
        self._armed = False
        self._noted_skips = 0
        self._named: dict[str, NamedSetting] = {}
        self._setting_back: dict[str, NamedSetting] = {}
        self._kept: dict[str, KeptSetting] = {}
        self._measured: Mapping[str, float] = {}
        self._rescues = 0
        self._dismissed: dict[str, float] = {}
        self._cool_until = -1
        self._rate = RateLimits()
        self._alarm: Alert | None = None
        self._before = BeforeAlarm()
        self._probes: list[float] = []
        self._probing_until = 0
        self._verifier = self._drift = False
        self._drifted = False
        self._moves: deque[Move] = deque()
        self._step: int | None = None

    @property
    def level(self) -> float | None:
        """Median reward before the newest alarm, in the reward's unit; None where none is known."""
        return self._before.level

    @property
    def measures(self) -> bool:
        """True while :meth:`next` needs the mean reward of each sampled batch, by which the rescue compares weights."""
        return self.stage in (Stage.PROBING, Stage.RESTORED, Stage.OUTSIDE)

    @property
    def listens(self) -> bool:
        """True while :meth:`next` needs the newest metrics of the run."""
        return self.measures or self.stage is Stage.FROZEN or bool(self._kept)

    def next(
        self, step: int, health: RunHealth, reward: float | None, measured: Mapping[str, float] | None = None
    ) -> Command | None:
        """Return the command to send at the boundary after ``step``, or None.

        Parameters
        ----------
        step
            The step that has ended.
        health
            Health of the run, as of the last judged step.
        reward
            Mean reward of the batch sampled last.
        measured
            The newest metrics, by canonical name, while :attr:`listens` is True.
        """
        if step == self._step:
            return None
        self._step, self._measured = step, measured or {}
        self._note_skips(step)
        if self.policy.skip_nonfinite and not self._armed:
            return self._guarded(step)
        if self.measures and reward is not None:
            self._probes.append(reward if math.isfinite(reward) else -math.inf)
        move = self._move(step, health)
        return None if move is None else self._command(move)

    def _command(self, move: Move) -> Command:
        return Command(uuid.uuid4().hex[:16], "", move.do, move.args, requested_by=self.policy.by, why=move.why)

    def answered(self, command: Command, refusal: str | None) -> None:
        """Take the result of a command that the rescue or a user sent.

        ``refusal`` is None if the command was executed, else the reason for its refusal. A setting that a user has
        changed is not changed back by the rescue.
        """
        if command.requested_by != self.policy.by:
            if refusal is None:
                self._kept = {name: kept for name, kept in self._kept.items() if kept.move.do != command.kind}
            return
        named = self._setting_back.pop(command.kind, None)
        if refusal is None:
            return
        self._note(self._step or 0, f"{command.kind} was refused: {refusal}")
        if named is not None:
            self._freeze(named, f"{command.kind} was refused: {refusal}")
            return
        if command.kind == "hold" and self.stage is Stage.PROBING:
            self._end("updates cannot be held here, so nothing is probed and nothing is done")
        elif command.kind == ROLLBACK and self.stage is Stage.RESTORED:
            self._mend("in place, as nothing could be restored")

    # The stages.

    def _move(self, step: int, health: RunHealth) -> Move | None:
        if self._moves:
            return self._popped(step)
        if self.stage is Stage.WATCHING:
            return self._insisted(step) or self._watched(step, health)
        if self.stage is Stage.FROZEN:
            return self._thawed(step)
        if self.stage is Stage.PROBING:
            self._remember(health)
        if self.measures and self._verifier_speaks(step, health):
            return None
        self._drift = self._drift or (self.measures and _drifting(health))
        probed = len(self._probes) >= self.policy.probe or step >= self._probing_until
        if self.stage is Stage.PROBING and probed:
            return self._current_judged(step)
        if self.stage is Stage.RESTORED and probed:
            return self._restored_judged(step)
        if self.stage is Stage.OUTSIDE and self._back(self._probes[-self.policy.probe :]):
            self._note(step, "the reward is back with the same weights: updates go on, at the full rate")
            self._end("")
            return self._popped(step)
        return None

    def _probe(self, step: int) -> None:
        """Measure from now on, until enough rewards are there or no more are expected."""
        self._probes, self._probing_until = [], step + self._before.every * (self.policy.probe + UNREWARDED)

    def _watched(self, step: int, health: RunHealth) -> Move | None:
        alarm = self.policy.alarm(health)
        unsound = bool(health.rows) and bool(health.rows[-1].why_not)
        if alarm is None or not unsound or step < self._cool_until or self._is_dismissed(alarm, health):
            return self._raised(step, health)
        self._alarm, self._named = alarm, {}
        self._remember(health)
        before = [row for row in health.rows if row.level is not None and not row.why_not]
        good = self._before.good = self._worth_restoring(health, before)
        at = [row for row in before if good is not None and row.step <= good] or before[: 1 if good == 0 else None]
        self._before.level = at[-1].level if at else None
        self._before.spread = at[-1].spread if at else 0.0
        self._before.top = max((row.level for row in before if row.level is not None), default=None)
        self._before.entropy = health.rows[-1].entropy
        rewarded = [row.step for row in health.rows if row.reward is not None]
        self._before.every = max(1, int(median(map(sub, rewarded[1:], rewarded)))) if len(rewarded) > 1 else 1
        self._drift = _drifting(health)
        self._note(
            step, f"{alarm.kind} since step {alarm.onset_step}", {"level": self._before.level, "last_good": good}
        )
        if self.policy.dry_run:
            self._cool_until = step + self.policy.cooldown_steps
            return None
        self.stage = Stage.PROBING
        self._probe(step)
        return Move("hold", {"batches": HELD}, f"{alarm.kind}: are the current weights really worse?")

    def _current_judged(self, step: int) -> Move | None:
        current, back = self._probes[: self.policy.probe], self._back(self._probes)
        self._note(step, "current weights", {"rewards": list[JSON](current), "level": self._before.level})
        kind = self._alarm.kind if self._alarm is not None else ""
        beyond = self._beyond(self._probes)
        if back and not self._drift and kind not in MISMATCH_KINDS | EXPLODING_KINDS:
            self._note(step, "a false alarm: the current weights are as good as before")
            if self._alarm is not None and self._before.level is not None:
                self._dismissed[self._alarm.alert_id] = self._before.level
            self._end("")
            return self._popped(step)
        if self._rescues >= self.policy.most:
            self.stage = Stage.ENDED
            self._note(step, f"cannot be saved: it failed again after {self._rescues} rescues")
            why = "it cannot be saved: restore the last good state and stop"
            self._moves.extend([Move(ROLLBACK, {"to": LAST_GOOD}, why), Move("stop", {"save": "yes"}, why)])
            return self._popped(step)
        if self._drift and self._drifted:
            self._stay_out(
                step,
                "the engine drifts from the trainer again, though its samples are corrected and the rate is lower, and "
                "its rewards judge no weights: updates stay held, with the current weights, and a person is needed",
            )
            return None
        if back:
            self._mend("in place, as the reward has not fallen")
            return self._popped(step)
        if self._before.good is None and beyond:
            self._stay_out(step, f"{STRANGE}; updates stay held, with the current weights, and a person is needed")
            return None
        if self._before.good is None:
            self._mend("in place, as no snapshot is known to be good")
            return self._popped(step)
        self.stage = Stage.RESTORED
        self._probe(step)
        now = f"reward {_numbers(current)}" if current else "no reward was measured"
        level = self._before.level
        before = "" if level is None else f", {number(level)} before"
        odd = f": {STRANGE}" if beyond else ""
        return Move(ROLLBACK, {"to": LAST_GOOD}, f"{now} with the current weights{before}{odd}")

    def _restored_judged(self, step: int) -> Move | None:
        restored = list(self._probes)
        self._note(step, "restored weights", {"rewards": list[JSON](restored), "level": self._before.level})
        if not restored or self._before.level is None:
            self._mend("no reward says whether the restored weights are good")
            return self._popped(step)
        if self._back(restored):
            self._mend("the reward is back with the restored weights, so the fault lay in the optimisation")
            return self._popped(step)
        if self._drift:
            self._mend("the engine drifts from the trainer, so its rewards do not judge the restored weights")
            return self._popped(step)
        reason = STRANGE_AGAIN if self._beyond(restored) else "the reward does not come back with good weights"
        self._stay_out(
            step,
            f"{reason}: the fault lies outside the policy (reward, verifier, data or engine); updates stay held, and a "
            "person is needed",
        )
        return None

    def _stay_out(self, step: int, why: str) -> None:
        """Keep updates held until the reward is back."""
        self.stage = Stage.OUTSIDE
        self._note(step, why)

    def _worth_restoring(self, health: RunHealth, sound: Sequence[JudgedRow]) -> int | None:
        """Return the step of the last good snapshot; None for the weights of the beginning once the run has gained."""
        good = self._last_good()
        levels = [row.level for row in sound if row.level is not None]
        if good != 0:
            return good
        gained = not levels or max(levels) > levels[0] + (1.0 - NEAR) * abs(levels[0])
        return None if gained or len(health.rows) >= ROWS_KEPT else 0  # then the first rows are no longer there

    def _verifier_speaks(self, step: int, health: RunHealth) -> bool:
        """Hold updates while the verifier is known to have changed; once it is repaired, judge the weights again."""
        changed = _verifier_changed(health)
        if changed and self.stage is not Stage.OUTSIDE:
            self.stage = Stage.OUTSIDE
            self._note(
                step,
                "the verifier scores known answers differently, so the reward cannot judge weights: the fault lies "
                "outside the policy; updates stay held, and a person is needed",
            )
        elif not changed and self._verifier:
            self.stage = Stage.PROBING
            self._note(step, "the verifier scores known answers as before: are the current weights worse?")
        if changed or self._verifier:
            self._probe(step)  # rewards measured so far are invalid
        self._verifier, spoke = changed, changed or self._verifier
        return spoke

    def _is_dismissed(self, alarm: Alert, health: RunHealth) -> bool:
        """Return whether the alert was found to be false, and the reward has not fallen since."""
        level = self._dismissed.get(alarm.alert_id)
        now = health.rows[-1].level
        return level is not None and (now is None or now >= level - (1.0 - NEAR) * abs(level))

    def _raised(self, step: int, health: RunHealth) -> Move | None:
        """Return the command that raises the learning rate again, after quiet steps."""
        quiet = step - self._rate.changed_at >= self.policy.quiet_steps and self.policy.alarm(health) is None
        if self._rate.scale >= self._rate.ceiling or not quiet:
            return None
        self._rate.scale, self._rate.changed_at = min(self._rate.ceiling, self._rate.scale * RAISE), step
        self._note(
            step, f"{self.policy.quiet_steps} quiet steps: the learning rate becomes {self._rate.scale:g} of its own"
        )
        args = {"scale": self._rate.scale, "freeze": "yes" if self._rate.scale < 1.0 else "no"}
        return Move(LOWER_LR, args, f"{self.policy.quiet_steps} quiet steps")

    # Removing the cause.

    def _mend(self, why: str) -> None:
        self._rescues += 1
        kind = self._alarm.kind if self._alarm is not None else ""
        beyond = next((one for metric, one in self._named.items() if metric not in SET_BACK), None)
        if beyond is not None:
            self._freeze(beyond, f"no command sets {beyond.metric}")
            return
        exploding = kind in EXPLODING_KINDS or (self._before.entropy or 0.0) > MANY_NATS
        self._lower(kind, mild=exploding or kind in MISMATCH_KINDS or bool(self._named))
        moves = [Move(LOWER_LR, {"scale": self._rate.scale, "freeze": "yes"}, why)]
        moves += [self._set_back(one) for metric, one in self._named.items() if metric != RATE]
        self._setting_back = {SET_BACK[metric]: one for metric, one in self._named.items()}
        if exploding and "policy/entropy_coef" not in self._named:
            moves.append(Move("set-entropy-coef", {"value": 0.0}, "the entropy exploded"))
        if self._drift or kind in MISMATCH_KINDS:
            moves.append(Move("set-is-correction", {"mode": "sequence_mask"}, "trainer and engine drift apart"))
            moves.append(Move("sync-weights", {}, "trainer and engine drift apart"))
            self._drifted = True
        evidence: dict[str, JSON] = {"scale": self._rate.scale, "kind": kind}
        evidence |= {metric: f"{number(one.before)} before step {one.since}" for metric, one in self._named.items()}
        self._note(self._step or 0, f"remove the cause: {why}", evidence)
        self.stage = Stage.MENDING
        self._moves.extend(moves)
        self._end(why)

    def _lower(self, kind: str, *, mild: bool) -> None:
        """Choose the fraction of the learning rate, and the one to which it may rise again."""
        scale = self.policy.mild_scale if mild else self.policy.scale
        if self._rescues > 1:  # this rate itself is too high: never return to it
            self._rate.ceiling = min(self._rate.ceiling, self._rate.scale / RAISE)
        rate = self._named.get(RATE)
        if rate is None:
            self._rate.scale *= scale
            if kind == FIRST_UPDATES:  # no rate up to this one has ever been good in this run
                self._rate.ceiling = min(self._rate.ceiling, self._rate.scale)
            return
        now = self._measured.get(RATE, rate.after)
        self._rate.scale *= min(1.0, rate.before / now) if now > 0 else 1.0
        self._rate.ceiling = min(self._rate.ceiling, self._rate.scale)
        self._rate.scale *= scale if self._rescues > 1 else 1.0

    # Settings that changed.

    def _remember(self, health: RunHealth) -> None:
        """Remember what the diagnosis names while the rows that show it are not undone."""
        for one in health.named:
            self._named.setdefault(one.metric, one)

    def _set_back(self, named: NamedSetting) -> Move:
        """Return the command that sets it to its value before the change, and remember it."""
        command = SET_BACK[named.metric]
        args: dict[str, JSON] = {"value": named.before}
        if command == "set-clip":
            low = self._values(command).get("low")
            own = isinstance(low, int | float) and not _same(low, named.after)
            args = {"low": low if own else named.before, "high": named.before}
        since = f"step {named.since} ({number(named.before)} to {number(named.after)})"
        move = Move(command, args, f"{named.metric} changed at {since} and is a {named.sure} cause of the failure")
        self._kept[named.metric] = KeptSetting(move, named.before, self._step or 0)
        return move

    def _insisted(self, step: int) -> Move | None:
        """Return the command that sets a setting back again, because the trainer has changed it since."""
        for metric, kept in list(self._kept.items()):
            value = self._measured.get(metric)
            if value is None or step < kept.at + SETTLES or _same(value, kept.value):
                continue
            if not kept.left:
                del self._kept[metric]
                self._note(step, f"{metric} does not stay what it was set to: the trainer changes it")
                continue
            kept.at, kept.left = step, kept.left - 1
            return kept.move
        return None

    def _freeze(self, named: NamedSetting, reason: str) -> None:
        """Keep updates held: what broke the run is still there."""
        self._moves.clear()
        self._setting_back.clear()
        self._named = {named.metric: named}
        self.stage = Stage.FROZEN
        self._note(
            self._step or 0,
            f"{named.metric} changed at step {named.since} from {number(named.before)} to {number(named.after)}, "
            f"and {reason}; updates stay held until it is {number(named.before)} again, and a person is needed",
        )

    def _thawed(self, step: int) -> Move | None:
        """Let updates go on once a person has set the setting back."""
        (named,) = self._named.values()
        value = self._measured.get(named.metric)
        if value is None or not _same(value, named.before):
            return None
        self._note(step, f"{named.metric} is {number(named.before)} again: updates go on, at the full rate")
        self._end("")
        return self._popped(step)

    # Updates whose gradient is not finite.

    def _guarded(self, step: int) -> Command | None:
        self._armed = True
        why = "from the start, updates whose gradient is not finite are left out"
        if self.policy.dry_run:
            self._note(step, why)
            return None
        return self._command(Move(SKIP_STEP, {"steps": HELD, "when": NONFINITE}, why))

    def _note_skips(self, step: int) -> None:
        """Note updates that were left out, each time that their number has doubled."""
        skipped = self._skipped()
        if skipped >= max(1, 2 * self._noted_skips):
            self._noted_skips = skipped
            self._note(step, "updates with a gradient that is not finite were left out", {"skipped": skipped})

    def _end(self, why: str) -> None:
        """End the hold after the waiting commands, and cool down."""
        if self.stage is not Stage.MENDING and why:
            self._note(self._step or 0, why)
        self._moves.append(Move("hold", {"batches": 0}, "updates go on"))
        self._alarm = None

    def _popped(self, step: int) -> Move | None:
        if not self._moves:
            return None
        move = self._moves.popleft()
        if not self._moves and self.stage is not Stage.ENDED:
            self.stage = Stage.WATCHING
            self._cool_until, self._rate.changed_at = step + self.policy.cooldown_steps, step
        return move

    def _back(self, rewards: Sequence[float]) -> bool:
        """Return whether the mean of these rewards is as good as the level before, within noise."""
        if self._before.level is None or len(rewards) < self.policy.probe or self._beyond(rewards):
            return False
        mean = sum(rewards) / len(rewards)
        allowed = max((1.0 - NEAR) * abs(self._before.level), self._before.spread / math.sqrt(len(rewards)))
        return mean >= self._before.level - allowed

    def _beyond(self, rewards: Sequence[float]) -> bool:
        """Return whether the mean of these rewards is far above the highest one before the alarm; of weights that were
        restored or held, above what good weights earned.
        """
        top = self._before.top if self.stage is Stage.PROBING else self._before.level
        limit = math.inf if top is None else top + max(BEYOND * self._before.spread, abs(top))
        return bool(rewards) and sum(rewards) / len(rewards) > limit

    def _note(self, step: int, why: str, evidence: Mapping[str, JSON] | None = None) -> None:
        self.notes.append(Note(step, self.stage, why, evidence or {}))


def _same(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=SAME, abs_tol=1e-12)


def _verifier_changed(health: RunHealth) -> bool:
    signs: tuple[Finding | Alert, ...] = (*health.findings, *health.alerts)
    return any(sign.kind in VERIFIER_KINDS and sign.severity is Severity.CRITICAL for sign in signs)


def _drifting(health: RunHealth) -> bool:
    signs: tuple[Finding | Alert, ...] = (*health.findings, *health.alerts)
    return any(sign.kind in DRIFT_KINDS and sign.severity is not Severity.INFO for sign in signs)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(map(number, values))
