"""Records that the parts of rlwatch pass to each other: frozen dataclasses with little behaviour of their own.

Numbers are plain floats. ``nan``, ``inf`` and ``-inf`` are values; a metric that was not measured is absent from the
mapping. Steps are the trainer's global (optimizer) steps, integers >= 0. Times are Unix seconds. An *attempt* is one
process of a run, numbered from 1: each resume is a new one. ``seq`` is the position of a row or event in the run's
stream.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
JSON = Any
"""A value that ``json`` can write: str, int, float, bool, None, list, dict."""


class Severity(StrEnum):
    """Severity of a finding or an alert: ``info`` < ``warning`` < ``critical``."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Severity as a number for comparison: 0 for info, 1 for warning, 2 for critical."""
        return _RANKS[self._value_]


_RANKS = {severity._value_: rank for rank, severity in enumerate(Severity)}
"""Rank of each severity by its text, whose hash is known: it is asked many times a row."""


class Stage(StrEnum):
    """Reported stages in the life of a finding: it began, got worse, eased to a lower severity, or ended."""

    BEGAN = "began"
    WORSENED = "worsened"
    EASED = "eased"
    RESOLVED = "resolved"

    @property
    def better(self) -> bool:
        """Return whether the stage is a recovery: the finding eased or ended."""
        return self in (Stage.EASED, Stage.RESOLVED)


IMPORTED = "imported from a log"
"""Reason that ends an imported run whose training ended by itself."""


class RunState(StrEnum):
    """State of a run as its writer recorded it. A reader decides whether a ``running`` run is in truth dead."""

    RUNNING = "running"
    FINISHED = "finished"
    CRASHED = "crashed"
    UNFINISHED = "unfinished"
    """For an imported log: the log ends before its trainer was done."""


class CommandStatus(StrEnum):
    """States of a user's command to a run: queued -> claimed -> done, rejected or failed; or expired or cancelled.

    Claimed: the training process has the command and waits for a safe point. Cancelling: claimed, and to be dropped
    unless its execution has begun. Failed: its execution began, and it is not known how far it came. Expired or
    cancelled: its execution never began.
    """

    QUEUED = "queued"
    CLAIMED = "claimed"
    CANCELLING = "cancelling"
    DONE = "done"
    REJECTED = "rejected"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def open(self) -> bool:
        """Return whether the command has no final result yet: it is queued, claimed or being cancelled."""
        return self in (CommandStatus.QUEUED, CommandStatus.CLAIMED, CommandStatus.CANCELLING)


class AlertState(StrEnum):
    """States of an alert: pending -> firing -> resolved. A pending alert may disappear before it fires."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class OutboxStatus(StrEnum):
    """States of an outgoing message: pending -> sent, or dead after the last failed attempt."""

    PENDING = "pending"
    SENT = "sent"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RunEdit:
    """A user's change of a run's name, tags, notes or state, stored separately from what the trainer wrote.

    ``by`` is the user and ``at`` the time in Unix seconds. A field that is None or empty changes nothing, except that
    an empty ``name`` restores the trainer's name.
    """

    run_id: str
    by: str
    at: float = 0.0
    name: str | None = None
    notes: str | None = None
    tagged: tuple[str, ...] = ()
    untagged: tuple[str, ...] = ()
    archived: bool | None = None
    deleted: bool | None = None


@dataclass(frozen=True, slots=True)
class Curation:
    """The combined result of all edits of one run by users: notes, archived or deleted, and by whom.

    ``edited_at`` and ``deleted_at`` are Unix seconds or None. ``logged_name`` and ``logged_tags`` are the name and the
    tags that the trainer wrote. A run with a heartbeat after its deletion is not deleted, because it was resumed.
    """

    notes: str = ""
    archived: bool = False
    deleted_at: float | None = None
    deleted_by: str = ""
    edited_at: float | None = None
    edited_by: str = ""
    logged_name: str = ""
    logged_tags: tuple[str, ...] = ()

    @property
    def deleted(self) -> bool:
        """Return whether the run is deleted: hidden until a user restores it or removes its data for good."""
        return self.deleted_at is not None


@dataclass(frozen=True, slots=True)
class Purge:
    """Record of a run whose data were removed for good.

    ``by`` and ``at``: the user who removed the data, and when (Unix seconds). ``deleted_by`` and ``deleted_at``: the
    user who had deleted the run before.
    """

    run_id: str
    project: str
    name: str
    by: str
    at: float
    deleted_by: str
    deleted_at: float


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of one training run: identity, configuration, state, and the position of its training.

    Parameters
    ----------
    run_id
        Unique id; the directory (or database row) with this id can be moved to another store.
    project, name, tags
        Names that users search by. Readers of a store return ``name`` and ``tags`` as users edited them, writers the
        trainer's.
    source
        Trainer (``"trl/grpo"``, ``"verl"``, ``""`` for a custom loop); decides the meaning of ambiguous metric names.
    created_at, heartbeat_at, last_ts
        Time of creation, of the last heartbeat, and of the last row (Unix seconds).
    config
        Settings of the training.
    attempt
        Number of processes that trained the run, from 1.
    state, state_reason
        State that the writer recorded, and its reason.
    last_step
        Last step of which a row is stored; None without rows.
    host, pid
        Machine and process id of the training process.
    curation
        Other edits by users.
    stage, stage_since
        Stage of the training process at the last heartbeat (``sampling``, ``reward``...; empty: unknown), and when that
        stage began (Unix seconds).
    """

    run_id: str
    project: str = "default"
    name: str = ""
    source: str = ""
    created_at: float = 0.0
    config: Mapping[str, JSON] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    attempt: int = 1
    state: RunState = RunState.RUNNING
    state_reason: str = ""
    heartbeat_at: float | None = None
    last_step: int | None = None
    last_ts: float | None = None
    host: str = ""
    pid: int | None = None
    curation: Curation = Curation()
    stage: str = ""
    stage_since: float | None = None

    @property
    def imported(self) -> bool:
        """Return whether the run is a log that was imported to its end; no process ever trained it here."""
        # Not by its tag, which users may edit.
        ended = self.state is RunState.UNFINISHED or (self.state is RunState.FINISHED and self.state_reason == IMPORTED)
        return ended and self.pid is None and not self.host


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One row: some metrics of one step. Several rows may have the same step; they are merged when the step closes.

    Parameters
    ----------
    step
        The trainer's optimizer step.
    metrics
        Name -> value, with the trainer's names; :mod:`rlwatch.metrics` translates them to canonical ones.
    ts
        Time of logging, Unix seconds.
    attempt
        Process of the run that logged the row, from 1.
    rank
        Rank that logged the row.
    seq
        Position in the run's stream of rows and events (1, 2, ... without gaps); 0 while not yet assigned.
    """

    step: int
    metrics: Mapping[str, float]
    ts: float = 0.0
    attempt: int = 1
    rank: int = 0
    seq: int = 0


class PackedMetrics(Mapping[str, float]):
    """Metrics of a row as packed bytes (little-endian float64, one for each name), which are decoded on first use."""

    __slots__ = ("_read", "names", "packed")

    def __init__(self, names: tuple[str, ...], packed: bytes) -> None:
        self.names, self.packed = names, packed
        self._read: dict[str, float] | None = None

    def plain(self) -> dict[str, float]:
        """Return the metrics as a dictionary, the same object at each call."""
        if self._read is None:
            values = struct.unpack(f"<{len(self.names)}d", self.packed)
            self._read = dict(zip(self.names, values, strict=True))
        return self._read

    def __getitem__(self, name: str) -> float:
        return self.plain()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(self.plain())


def all_finite(values: Collection[float]) -> bool:
    """Return True if no value is NaN or infinite. A finite sum shows it in a third of the time.

    >>> all_finite([1.0, 2.0]), all_finite([1.0, float("inf"), float("-inf")]), all_finite([1e308, 1e308])
    (True, False, True)
    """
    return isfinite(sum(values)) or all(map(isfinite, values))


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """One step as detectors receive it: all rows of the step merged, with canonical metric names.

    Parameters
    ----------
    step
        The optimizer step.
    metrics
        Canonical name -> value, which may be NaN or infinite.
    origin
        Canonical name -> the trainer's name of the metric.
    ts, attempt
        Unix seconds, and process of the run.
    seq
        Position of the last merged row in the run's stream.
    numbers
        The finite metrics only, computed once for all detectors; the same object as ``metrics`` where all are finite.
    """

    step: int
    metrics: Mapping[str, float]
    origin: Mapping[str, str] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0
    numbers: Mapping[str, float] = field(init=False, repr=False, compare=False)
    beginning: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """Cache of metric names by prefix, filled on demand; rows with the same names in the same order share one."""

    def __post_init__(self) -> None:
        """Precompute the finite metrics."""
        metrics = self.metrics
        whole = all_finite(metrics.values())
        numbers = metrics if whole else {name: value for name, value in metrics.items() if isfinite(value)}
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "beginning", _beginning.of(metrics))

    def get(self, *names: str) -> float | None:
        """Return the value of the first of the metrics ``names`` that was measured (may be NaN or infinite); None if
        none was.
        """
        for name in names:
            value = self.metrics.get(name)
            if value is not None:
                return value
        return None


class ByNames(Generic[T]):
    """Results of a function of the names of a row's metrics, in their order, remembered for the newest rows.

    The next row mostly has the same names, which are compared in a third of the time that a look-up takes.
    """

    def __init__(self, made: Callable[[tuple[str, ...]], T]) -> None:
        self._made = lru_cache(maxsize=64)(made)
        self._newest: tuple[list[str], T] | None = None

    def of(self, metrics: Mapping[str, float]) -> T:
        """Return it for the names of ``metrics``, the same object for the same names."""
        newest, names = self._newest, list(metrics)
        if newest is not None and newest[0] == names:
            return newest[1]
        found = self._made(tuple(names))
        self._newest = names, found
        return found


def _empty(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:  # noqa: ARG001
    return {}


_beginning = ByNames(_empty)

GROUP_TAG = "group:"
"""Prefix of a tag that assigns a run to a group: runs of one configuration that differ in the seed only."""
FAR_OUT = "far-out tokens"
"""Reason of a spike batch: tokens of an ordinary step that are beyond a limit, the worst first."""
NON_FINITE = "non-finite tokens"
"""Reason of a spike batch: tokens of a step with NaN or infinite log-probs, these tokens first."""
CULPRITS = "culprits"
"""Reason of a spike batch: the tokens that gradient localisation found responsible for the step's gradient, worst
first.
"""
RESPONSES = "responses"
"""Reason of a spike batch: every token of the responses that contain culprits (or of a stretch around them)."""
DISTRIBUTIONS = "token distributions"
"""Reason of a spike batch: histograms of quantities over all tokens of the step; it has no rows of single tokens."""
ORIGIN = "origin"
"""Key of the configuration under which rlwatch stores its own entries; a trainer's setting with that name is left
alone.
"""
FORECAST_SWITCH = "forecast"
"""Entry of :data:`ORIGIN`: False where the run was started with ``forecast=False``."""
STAGES = "stages"
"""Reason of a spike batch: the stages of the step; columns ``stage`` (str), ``begin`` (Unix seconds), ``seconds``
(float64).
"""
APART = (DISTRIBUTIONS, STAGES)
"""Reasons of batches that are returned only when asked for by reason, because they contain no tokens."""
STALLED = "stalled"
"""Kind of an event: the process lives but makes no progress; it has its stage and the stacks of its threads."""
STALL_OVER = "stall_over"
"""Kind of an event: a stalled process makes progress again."""
SHED = "shed"
"""Kind of an event: data were dropped because the store accepted nothing and its buffer was nearly full."""
COMMAND = "command"
"""Kind of an event: a command was executed; with its arguments and its report."""
SNAPSHOTS = "snapshots"
"""Kind of an event: from this step on the run keeps snapshots to which it can be rolled back."""
LOCALISED = "gradient_localised"
"""Kind of an event: summary of what gradient localisation found about the step's gradient."""
CRASH_FORECAST = "crash_forecast"
"""Kind of the finding that reports a forecast whose risk of failure raises an alarm."""


@dataclass(frozen=True, slots=True)
class SpikeBatch:
    """Data on single tokens of one step and rank, recorded for one ``reason``, in columns of equal length N.

    ``columns``: name -> array or list. ``ts``: Unix seconds. ``attempt``: process of the run.

    Usual columns: ``sequence``, ``position``, ``token_id`` (int64); ``logp``, ``old_logp``, ``rollout_logp``,
    ``ref_logp`` (nats), ``ratio``, ``advantage``, ``entropy`` (nats), ``screen`` (float64: |A| r (1 - p), the norm of
    the token's gradient at the logits, up to a factor of sqrt 2); ``text`` (str, opt-in). ``nan`` in a float column
    means NaN was measured; a column that was not measured is absent.

    With the reason :data:`CULPRITS` or :data:`RESPONSES` also ``microbatch`` (int64), ``reward``, ``coefficient``
    (dL/dlogp), ``entropy_coefficient`` (dL/dentropy), ``contribution`` (signed, in the unit of the gradient norm; over
    the step the contributions add up to the norm) and ``share`` (contribution / norm).

    With the reason :data:`CULPRITS` also ``cause`` and ``why`` (str), ``verified`` (int64, 0 or 1), ``own_norm`` (norm
    of the token's own gradient, valid only where ``verified`` is 1) and ``layers`` (str: JSON object, layer -> share of
    ``own_norm`` squared; ``{}`` where not verified). If text is kept also ``before`` and ``after`` (text around the
    token), ``text_position`` (characters before it) and ``prompt``. Where the trainer knows them: ``prompt_index``,
    ``sample``, ``sampler_version`` (int64, -1: not known), ``group``, ``rollout``, ``task``, ``reward_parts`` (str,
    JSON), see :data:`rlwatch.export.COLUMNS`.

    With the reason :data:`DISTRIBUTIONS` a row is a bin with tokens in it: ``quantity``, ``bin`` and ``count``
    (integers), which :func:`rlwatch.distributions.distributions` reads.
    """

    step: int
    columns: Mapping[str, np.ndarray | Sequence[str]]
    reason: str = ""
    ts: float = 0.0
    attempt: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Completions of one step as text, chosen and shortened by the recorder, in columns of equal length N.

    ``columns``: name -> array or list. Usual ones: ``prompt``, ``completion`` (str); ``reward``, ``advantage``
    (float64, NaN where NaN was measured); ``length`` (int64, tokens); ``group`` (int64, number of the prompt); ``task``
    (str). ``ts``: Unix seconds. ``attempt``: process of the run.
    """

    step: int
    columns: Mapping[str, np.ndarray | Sequence[str]]
    ts: float = 0.0
    attempt: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


class JudgedRow(NamedTuple):
    """One row of a run and the reason why the run was not healthy at that row (``why_not``; empty where it was).

    Parameters
    ----------
    step
        The optimizer step.
    why_not
        Reason; empty where the run was healthy.
    level
        Median reward of the last rows; None where rewards are not logged.
    spread
        Noise of one row's reward, in the unit of the reward.
    entropy
        Entropy divided by its first value in the run; None where it is not logged.
    reward
        Reward of this row; None where it is not logged.
    """

    step: int
    why_not: str
    level: float | None = None
    spread: float = 0.0
    entropy: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run and is no measurement: ``reference_reset``, ``resume``, ``exception``,
    ``note``...

    Detectors may restart a baseline after an event. ``body``: details as JSON values. ``ts``: Unix seconds.
    ``attempt``: process of the run. ``seq``: position in the run's stream of rows and events.
    """

    kind: str
    step: int | None = None
    body: Mapping[str, JSON] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a detector found at ``step``, using only data up to ``step``.

    Parameters
    ----------
    detector, family
        The detector and its family.
    kind
        Kind of failure.
    severity
        Present severity; ``info`` for one that ended.
    step, onset_step
        Step at which the problem was found, and the step at which it began, in retrospect.
    message
        Description in a sentence.
    evidence
        Numbers on which the finding is based.
    metric
        Metric in which it was found.
    score
        How far the metric is beyond its threshold, without unit; >= 1 where the detector fires.
    baseline
        The run's own reference level, in the unit of the metric.
    attempt, seq
        Process of the run, and position of the row after which it was found.
    stage
        Reported stage of its life: it began, worsened, eased or ended.
    """

    detector: str
    kind: str
    severity: Severity
    step: int
    onset_step: int
    message: str
    evidence: Mapping[str, JSON] = field(default_factory=dict)
    metric: str = ""
    family: str = ""
    score: float | None = None
    baseline: float | None = None
    attempt: int = 1
    seq: int = 0
    stage: Stage = Stage.BEGAN


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """A forecast made at ``step``, stored separately from the measurements. See :class:`rlwatch.forecast.Forecast`.

    ``metrics``: its numbers ``forecast/...``. ``body``: values that are not numbers. ``seq``: position of the row after
    which it was made. ``ts``: Unix seconds. ``attempt``: process of the run.
    """

    step: int
    metrics: Mapping[str, float]
    body: Mapping[str, JSON] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert: an alert rule that fired on a run for one kind of finding, until the finding ends.

    Parameters
    ----------
    alert_id
        Hash of run, rule, kind and the position at which the alert began.
    run_id, rule, kind
        The run, the name of the alert rule, and the kind of finding.
    severity, state
        Severity, and whether it is pending, firing or resolved.
    onset_step, step
        Step at which the problem began, in retrospect, and the last step at which it was seen.
    message, reason
        Description of the problem, and why the rule fired.
    detector, evidence
        Detector that found it, and the numbers on which the finding is based.
    fired_at, resolved_at
        Unix seconds; None before.
    resolved_step
        Step at which the alert was resolved.
    """

    alert_id: str
    run_id: str
    rule: str
    kind: str
    severity: Severity
    state: AlertState
    onset_step: int
    step: int
    message: str
    reason: str = ""
    detector: str = ""
    evidence: Mapping[str, JSON] = field(default_factory=dict)
    fired_at: float | None = None
    resolved_step: int | None = None
    resolved_at: float | None = None


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A user's acknowledgement of an alert: it is not repeated or escalated, unless it gets worse than ``severity``.

    ``by``: the user. ``why``: the user's reason. ``at``: Unix seconds.
    """

    alert_id: str
    run_id: str
    by: str
    why: str = ""
    at: float = 0.0
    severity: Severity = Severity.CRITICAL


@dataclass(frozen=True, slots=True)
class Silence:
    """A period in which matching alerts are not sent. Empty fields match every alert; an alert must match all other
    fields.

    Parameters
    ----------
    silence_id, by, why
        Id, the user who set it, and the reason.
    created_at, until
        Begin and end, Unix seconds; an ``until`` in the past: it is over.
    run
        Id or name of a run.
    project, kind, rule
        Project of the run, kind of finding, and name of the alert rule.
    labels
        Labels of the alert rule.
    alerts
        Ids of single alerts that a user snoozed.
    up_to
        Alerts above this severity are sent all the same; None: none is.
    """

    silence_id: str
    by: str
    why: str
    created_at: float
    until: float
    run: str = ""
    project: str = ""
    kind: str = ""
    rule: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    alerts: tuple[str, ...] = ()
    up_to: Severity | None = None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action or comment of a user in the audit log.

    ``at``: Unix seconds. ``by``: the user. ``act``: ``note``, ``acknowledge``, ``silence``... ``text``: description.
    ``run_id`` and ``alert_id``: the run and the alert it concerns, if any.
    """

    entry_id: str
    at: float
    by: str
    act: str
    text: str
    run_id: str = ""
    alert_id: str = ""


@dataclass(frozen=True, slots=True)
class ForecastAnswer:
    """A user's answer to the question whether the forecast at a step was right.

    ``right``: a problem came as forecast. ``by`` and ``why``: the user and the reason. ``at``: Unix seconds.
    ``attempt``: process of the run.
    """

    run_id: str
    step: int
    right: bool
    by: str
    why: str = ""
    at: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message to one notification channel, with its content and the state of its delivery.

    Parameters
    ----------
    message_id, run_id, alert_id
        Ids of the message, the run and the alert.
    channel
        Name of the channel in the configuration; its address and its secret are never stored.
    payload
        Content.
    status, attempts, last_error
        State, number of tries so far, and the last error.
    next_attempt_at, created_at, sent_at
        Unix seconds; ``sent_at`` is None until the message is sent.
    lease_until
        Unix seconds until which one process alone may send the message.
    """

    message_id: str
    run_id: str
    alert_id: str
    channel: str
    payload: Mapping[str, JSON]
    status: OutboxStatus = OutboxStatus.PENDING
    attempts: int = 0
    next_attempt_at: float = 0.0
    lease_until: float = 0.0
    last_error: str = ""
    created_at: float = 0.0
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Alerts of one run (or of several), the messages about them, and their acknowledgements, read at one moment."""

    alerts: tuple[Alert, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A user's command to a live run, as a row in the store.

    Parameters
    ----------
    command_id, run_id
        Ids of the command and the run.
    kind, args
        Kind, such as ``reset-reference``, and arguments, such as ``{"optimizer": "clear" | "keep"}``.
    force
        Override those vetoes that may be overridden.
    status, result
        State, and report or reason as text.
    requested_by, why
        The user and the reason.
    idempotency_key
        A second command of the run with the same key is not stored.
    created_at, expires_at, claimed_at, finished_at
        Unix seconds; a command that was not claimed before ``expires_at`` is never executed.
    finished_step
        Optimizer step at which the command was executed.
    """

    command_id: str
    run_id: str
    kind: str
    args: Mapping[str, JSON] = field(default_factory=dict)
    force: bool = False
    status: CommandStatus = CommandStatus.QUEUED
    requested_by: str = ""
    why: str = ""
    idempotency_key: str = ""
    created_at: float = 0.0
    expires_at: float = 0.0
    claimed_at: float | None = None
    finished_at: float | None = None
    finished_step: int | None = None
    result: str = ""
