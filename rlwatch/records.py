"""Records that rlwatch passes between its parts: frozen, without behaviour beyond reading themselves.

Numbers are plain floats. ``nan``, ``inf`` and ``-inf`` are values; a metric that was not measured is
absent from the mapping. Steps are the trainer's global (optimizer) steps, integers >= 0. Times are Unix
seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

JSON = Any
"""A value ``json`` can write: str, int, float, bool, None, list, dict."""


class Severity(StrEnum):
    """Badness: ``info`` < ``warning`` < ``critical``."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Return 0, 1 or 2, for comparison."""
        return ("info", "warning", "critical").index(self.value)


class Stage(StrEnum):
    """Stages of a finding's lifetime that are reported: it began, got worse, eased to a lower severity, or ended."""

    BEGAN = "began"
    WORSENED = "worsened"
    EASED = "eased"
    RESOLVED = "resolved"

    @property
    def better(self) -> bool:
        """Return whether it is a recovery, which is no sign of a failure."""
        return self in (Stage.EASED, Stage.RESOLVED)


class RunState(StrEnum):
    """State of a run as its writer left it. A reader decides whether a running run is stale."""

    RUNNING = "running"
    FINISHED = "finished"
    CRASHED = "crashed"
    UNFINISHED = "unfinished"
    """For logs: the log stops before its trainer was done."""


class CommandStatus(StrEnum):
    """States of a command: queued -> claimed -> done | rejected | failed; or expired or cancelled before it began.

    Claimed: the trainer's process has it and waits for a safe boundary. Cancelling: claimed, and to be dropped unless
    it has begun. Failed: it began, and its progress is unknown.
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
        """Return whether a result is still to come."""
        return self in (CommandStatus.QUEUED, CommandStatus.CLAIMED, CommandStatus.CANCELLING)


class AlertState(StrEnum):
    """States of an alert: pending -> firing -> resolved (a pending one may vanish)."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class OutboxStatus(StrEnum):
    """States of an outgoing message: pending -> sent, or dead after the last attempt."""

    PENDING = "pending"
    SENT = "sent"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RunEdit:
    """A user's change of a run, stored separately from what its trainer wrote; None or empty: unchanged.

    An empty ``name`` restores the trainer's.
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
    """The result of all edits of a run. ``edited_at`` None: never edited.

    ``logged_name`` and ``logged_tags`` are what its trainer wrote. A run with a heartbeat after its deletion is not
    deleted, because it was resumed.
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
        """Return whether it is hidden until it is restored or purged."""
        return self.deleted_at is not None


@dataclass(frozen=True, slots=True)
class Purge:
    """A run whose data were removed for good, with user and time, and the user who had deleted it."""

    run_id: str
    project: str
    name: str
    by: str
    at: float
    deleted_by: str
    deleted_at: float


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One training run. The directory (or row) of this id is the portable unit.

    ``source`` names the trainer (``"trl/grpo"``, ``"verl"``, ``""`` for a custom loop) and decides how ambiguous metric
    names are read. ``attempt`` counts process starts, from 1. A store's readers return ``name`` and ``tags`` as users
    edited them, and other edits under ``curation``; writers know only the trainer's. ``stage`` is the stage of its
    process at the last heartbeat (``sampling``, ``reward``...; empty: unknown), and ``stage_since`` its beginning (Unix
    seconds).
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


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Some metrics of one step. Several records may share a step; they merge when the step closes.

    ``seq`` is the position in the run's stream (1, 2, ... without gaps), 0 while not yet assigned.
    ``metrics`` keeps the names the source used; :mod:`rlwatch.metrics` reads them canonically.
    """

    step: int
    metrics: Mapping[str, float]
    ts: float = 0.0
    attempt: int = 1
    rank: int = 0
    seq: int = 0


class PackedMetrics(Mapping[str, float]):
    """Metrics of a row as a journal packed them: little-endian float64, one a name; decoded on first use."""

    __slots__ = ("_read", "names", "packed")

    def __init__(self, names: tuple[str, ...], packed: bytes) -> None:
        self.names, self.packed = names, packed
        self._read: dict[str, float] | None = None

    def plain(self) -> dict[str, float]:
        """A dictionary, the same one at each call."""
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


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """Input of the detectors: one step, its records merged, names canonical.

    ``origin`` maps a canonical name to the source name it was read from. ``seq`` is that of the record that closed the
    reading (the last merged one). ``numbers``: the finite metrics, computed once for all detectors; the same object as
    ``metrics`` where all are finite.
    """

    step: int
    metrics: Mapping[str, float]
    origin: Mapping[str, str] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0
    numbers: Mapping[str, float] = field(init=False, repr=False, compare=False)
    beginning: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """Cache of names by prefix, filled on demand: one for all rows with the same names in the same order."""

    def __post_init__(self) -> None:
        """Precompute the finite metrics."""
        metrics = self.metrics
        whole = all(map(isfinite, metrics.values()))
        numbers = metrics if whole else {name: value for name, value in metrics.items() if isfinite(value)}
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "beginning", _beginning(tuple(metrics)))

    def get(self, *names: str) -> float | None:
        """Return the value of the first of ``names`` that was measured (may be nan or inf); None if none was."""
        for name in names:
            value = self.metrics.get(name)
            if value is not None:
                return value
        return None


@lru_cache(maxsize=64)
def _beginning(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:  # noqa: ARG001  (the key of the cache)
    return {}


GROUP_TAG = "group:"
"""Prefix of a tag that names the group of seeds of a run: runs of one configuration, except for the seed."""
FAR_OUT = "far-out tokens"
"""Reason of a spike batch: tokens of an ordinary step that are beyond a limit, worst first."""
NON_FINITE = "non-finite tokens"
"""The same for a step in which the log-probs of some token were NaN or infinite: those come first."""
CULPRITS = "culprits"
"""Reason of a spike batch: the tokens that localisation found responsible for the gradient of the step, worst first."""
RESPONSES = "responses"
"""Reason of a spike batch: every token of the responses that contain culprits (or of a stretch around them)."""
DISTRIBUTIONS = "token distributions"
"""Reason of a spike batch: histograms of quantities over all tokens of the step; no rows of single tokens."""
ORIGIN = "origin"
"""Setting under which a run stores its origin; a setting of the trainer with that name is left alone."""
FORECAST_SWITCH = "forecast"
"""Entry of :data:`ORIGIN`: False where the run was begun with ``forecast=False``."""
STAGES = "stages"
"""The same for the stages of the step: columns ``stage`` (str), ``begin`` (Unix seconds) and ``seconds`` (float64)."""
APART = (DISTRIBUTIONS, STAGES)
"""Reasons of batches that are read only by their reason: they hold no tokens."""
STALLED = "stalled"
"""Kind of an event: the process lives but makes no progress; with its stage and the stacks of its threads."""
STALL_OVER = "stall_over"
"""Kind of an event: a stalled process continues."""
SHED = "shed"
"""Kind of an event: data dropped while the store accepted nothing and its buffer was nearly full."""
COMMAND = "command"
"""Kind of an event: an executed command, with its arguments and its report."""
SNAPSHOTS = "snapshots"
"""Kind of an event: the run keeps snapshots from this step on, to which it can be rolled back."""
LOCALISED = "gradient_localised"
"""Kind of an event: a summary of what localisation found about the gradient of the step."""
CRASH_FORECAST = "crash_forecast"
"""Kind of the finding of a forecast that is an alarm."""


@dataclass(frozen=True, slots=True)
class SpikeBatch:
    """Per-token records of one step and rank, in columns of equal length N.

    Usual columns: ``sequence``, ``position``, ``token_id`` (int64); ``logp``, ``old_logp``,
    ``rollout_logp``, ``ref_logp`` (nats), ``ratio``, ``advantage``, ``entropy`` (nats), ``screen`` (|A| r (1 - p):
    the norm of the token's gradient at the logits, up to a factor of sqrt 2; float64); ``text`` (str, opt-in).
    ``nan`` in a float column means NaN was measured; a column that was not measured is absent.

    Where ``reason`` is :data:`CULPRITS` or :data:`RESPONSES` also: ``microbatch`` (int64), ``reward``,
    ``coefficient`` (dL/dlogp), ``entropy_coefficient`` (dL/dentropy), ``contribution`` (signed, in the unit of the
    gradient norm; they sum up to it over the step), ``share`` (contribution / norm). Of culprits also ``cause`` and
    ``why`` (str), ``verified`` (int64, 0 or 1), ``own_norm`` (norm of the token's own gradient, to be read where
    ``verified`` is 1 only) and ``layers`` (str:
    JSON object, layer -> share of ``own_norm`` squared; ``{}`` where not verified); with text also ``before`` and
    ``after``, the text around it, ``text_position`` (characters before it) and ``prompt``. Where the trainer knows them
    of culprits: ``prompt_index``, ``sample``, ``sampler_version`` (int64, -1: not known), ``group``, ``rollout``,
    ``task``, ``reward_parts`` (str, JSON), see :data:`rlwatch.export.COLUMNS`.

    Where it is :data:`DISTRIBUTIONS` a row is a bin with tokens in it: ``quantity``, ``bin`` and ``count`` (integers),
    which :func:`rlwatch.distributions.distributions` reads.
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

    Usual columns: ``prompt``, ``completion`` (str); ``reward``, ``advantage`` (float64, NaN where it was NaN);
    ``length`` (int64, tokens); ``group`` (int64, which prompt); ``task`` (str).
    """

    step: int
    columns: Mapping[str, np.ndarray | Sequence[str]]
    ts: float = 0.0
    attempt: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


class JudgedRow(NamedTuple):
    """A judged row, and why the run was not sound there; "" where it was.

    In the unit of the reward: ``level``, the median of the last rows; ``spread``, the noise of a row; ``reward``, that
    of the row. ``entropy``: ratio to its first value. None where they are not logged.
    """

    step: int
    why_not: str
    level: float | None = None
    spread: float = 0.0
    entropy: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the run, not a measurement: ``reference_reset``, ``resume``, ``exception``, ``signal``, ``command``,
    ``note``... Detectors may restart a baseline on it.
    """

    kind: str
    step: int | None = None
    body: Mapping[str, JSON] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A detector's judgement that held at ``step``, using only data up to ``step``.

    ``onset_step`` is its beginning, in retrospect. ``stage``: the reported stage of its lifetime; ``severity`` is the
    present one if it eased, ``info`` if it ended. ``score``: how far it is beyond its threshold (>= 1 where it fires;
    unitless). ``baseline``: the run's own reference level in the metric's unit. ``evidence`` holds the numbers behind
    it.
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
    """A forecast made at ``step``, of the record ``seq``: a judgement, stored separately from measurements.

    ``metrics``: ``forecast/...``; ``body``: values that are not numbers. See :class:`rlwatch.forecast.Forecast`.
    """

    step: int
    metrics: Mapping[str, float]
    body: Mapping[str, JSON] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Alert:
    """One episode of one rule on one run. ``alert_id`` = hash(run, rule, kind, onset seq)."""

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
    """An acknowledged alert: no repeats and no escalation, unless it gets worse than ``severity``."""

    alert_id: str
    run_id: str
    by: str
    why: str = ""
    at: float = 0.0
    severity: Severity = Severity.CRITICAL


@dataclass(frozen=True, slots=True)
class Silence:
    """Alerts that match are not published until ``until``. Empty fields match all; all others must match.

    ``run`` is a run's id or name; ``labels`` are those of the rule. ``until`` in the past: it is over. ``alerts``: only
    these (ids), which a user snoozed. ``up_to``: alerts above this severity are published all the same; None: none is.
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
    """One action or comment of a user: who, when, and in words. ``act``: ``note``, ``acknowledge``, ``silence``...
    ``run_id`` and ``alert_id`` where it concerns one.
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
    """A user's answer to "was the forecast at this step right?": something did go wrong, or nothing did."""

    run_id: str
    step: int
    right: bool
    by: str
    why: str = ""
    at: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message to one notification channel. ``channel`` is a name in the configuration: the address and its secret are
    never stored.
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
    """The alerts of a run (or of several), the messages about them, and their acknowledgements."""

    alerts: tuple[Alert, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A user's command to the live run, as a row. ``kind`` is e.g. ``reset-reference``; ``args`` e.g.
    ``{"optimizer": "clear" | "keep"}``; ``force`` overrides vetoes that may be overridden.
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
