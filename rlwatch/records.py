"""Records that travel through rlwatch: frozen, no behaviour beyond reading themselves.

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
        """0, 1, 2: for comparing."""
        return ("info", "warning", "critical").index(self.value)


class Stage(StrEnum):
    """Moments of an episode that are told: it began, became worse, eased to a lower severity, was over."""

    BEGAN = "began"
    WORSENED = "worsened"
    EASED = "eased"
    RESOLVED = "resolved"

    @property
    def better(self) -> bool:
        """True of what tells of a recovery, which is no sign of a failure."""
        return self in (Stage.EASED, Stage.RESOLVED)


class RunState(StrEnum):
    """State of a run as its writer left it. That a running run is stale is for the reader to judge."""

    RUNNING = "running"
    FINISHED = "finished"
    CRASHED = "crashed"
    UNFINISHED = "unfinished"
    """Of a log: it stops before its trainer was done."""


class CommandStatus(StrEnum):
    """Life of a command: queued -> claimed -> done | rejected | failed; or expired or cancelled before it was begun.

    Claimed: the trainer's process has it and waits for a safe boundary. Cancelling: it has it, and is asked to let it
    go unless it has begun. Failed: it was begun, and nobody knows how far it came.
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
        """True if an answer is still to come."""
        return self in (CommandStatus.QUEUED, CommandStatus.CLAIMED, CommandStatus.CANCELLING)


class AlertState(StrEnum):
    """Life of an alert: pending -> firing -> resolved (a pending one may vanish)."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class OutboxStatus(StrEnum):
    """Life of a message to the outside: pending -> sent, or dead after the last try."""

    PENDING = "pending"
    SENT = "sent"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RunEdit:
    """A change that a person made to a run, beside what its trainer wrote; None, or empty: left as it was.

    An empty ``name`` gives the trainer's back.
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
    """The outcome of all edits of a run. ``edited_at`` None: nobody touched it.

    ``logged_name`` and ``logged_tags`` are what its trainer wrote. A run that gave a sign of life after it was deleted
    is not: somebody resumed it.
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
        """True if it is hidden until it is restored, or purged."""
        return self.deleted_at is not None


@dataclass(frozen=True, slots=True)
class Purge:
    """A run whose data were removed for good, by whom and when, and who had deleted it."""

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

    ``source`` names the trainer (``"trl/grpo"``, ``"verl"``, ``""`` for a loop of one's own) and decides
    how ambiguous metric names are read. ``attempt`` counts process starts, from 1. A store's readers give ``name`` and
    ``tags`` as people edited them, and what else people said under ``curation``; writers know the trainer's alone.
    ``stage`` is what its process did at the last heartbeat (``sampling``, ``reward``...; empty: not known), and
    ``stage_since`` when that began (Unix seconds).
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
    """Metrics of a row as a journal packed them: little-endian float64, one a name; numbers once somebody asks."""

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

    ``origin`` maps a canonical name to the source name it was read from. ``seq`` is that of the record
    that closed the reading (the last merged one). ``numbers``: those of the metrics that are finite, told apart once
    for all who ask; the metrics themselves where all are.
    """

    step: int
    metrics: Mapping[str, float]
    origin: Mapping[str, str] = field(default_factory=dict)
    ts: float = 0.0
    attempt: int = 1
    seq: int = 0
    numbers: Mapping[str, float] = field(init=False, repr=False, compare=False)
    beginning: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    """Names by how they begin, as far as somebody asked: one for all rows that name the same, in the same order."""

    def __post_init__(self) -> None:
        """Tell the numbers from what is none."""
        metrics = self.metrics
        whole = all(map(isfinite, metrics.values()))
        numbers = metrics if whole else {name: value for name, value in metrics.items() if isfinite(value)}
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "beginning", _beginning(tuple(metrics)))

    def get(self, *names: str) -> float | None:
        """Value of the first of ``names`` that was measured (may be nan or inf); None if none was."""
        for name in names:
            value = self.metrics.get(name)
            if value is not None:
                return value
        return None


@lru_cache(maxsize=64)
def _beginning(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:  # noqa: ARG001  (what the answers are of)
    return {}


GROUP_TAG = "group:"
"""A tag that begins so says which group of seeds a run is in: of one configuration, but for the seed."""
FAR_OUT = "far-out tokens"
"""Reason of a spike batch: tokens of an ordinary step that are beyond a limit, worst first."""
NON_FINITE = "non-finite tokens"
"""The same, of a step in which the log-probs of some token were NaN or infinite: those come first."""
CULPRITS = "culprits"
"""Reason of a spike batch: the tokens that localisation blames for the gradient of the step, worst first."""
RESPONSES = "responses"
"""Reason of a spike batch: every token of the responses that culprits are in (or of a stretch around them)."""
DISTRIBUTIONS = "token distributions"
"""Reason of a spike batch: how quantities lie over all tokens of the step, as counts; no rows of single tokens."""
ORIGIN = "origin"
"""Setting under which a run keeps where it comes from; one of the trainer's own of that name is left alone."""
FORECAST_SWITCH = "forecast"
"""Entry of :data:`ORIGIN`: False where the run was begun with ``forecast=False``."""
STAGES = "stages"
"""The same, of the stages of the step: columns ``stage`` (str), ``begin`` (Unix seconds) and ``seconds`` (float64)."""
APART = (DISTRIBUTIONS, STAGES)
"""Reasons of batches that are read only where their reason is said: they hold no tokens."""
STALLED = "stalled"
"""Kind of an event: the process lives and makes no progress; its stage and the stacks of its threads."""
STALL_OVER = "stall_over"
"""Kind of an event: a process that had stalled goes on."""
SHED = "shed"
"""Kind of an event: what was given up while the store took nothing and the room for it was nearly spent."""
COMMAND = "command"
"""Kind of an event: a command that was carried out, with its arguments and its report."""
LOCALISED = "gradient_localised"
"""Kind of an event: what localisation said of the gradient of the step, in short."""
CRASH_FORECAST = "crash_forecast"
"""Kind of a finding: what a forecast that is an alarm says."""


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
    """Some completions of one step as text, chosen and cut by whoever records them, in columns of equal length N.

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
    """A row that was judged, and why the run was not sound there; "" where it was.

    In the reward's unit, ``level`` is the median of the last rows, ``spread`` the noise of a row, ``reward`` the row's;
    ``entropy``: over its first, a ratio. None where they are not logged.
    """

    step: int
    why_not: str
    level: float | None = None
    spread: float = 0.0
    entropy: float | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run, not a measurement: ``reference_reset``, ``resume``,
    ``exception``, ``signal``, ``command``, ``note``... Detectors may restart a baseline on it.
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

    ``onset_step`` is when, looking back, it began. ``stage`` tells which moment of its life this is: of one that eased
    ``severity`` is what it is now, of one that is over ``info``. ``score`` is how far beyond its threshold (>= 1 where
    it fires; unitless), ``baseline`` the run's own reference level in the metric's unit. ``evidence``
    holds the numbers a person needs to believe it.
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
    """A forecast made at ``step``, of the record ``seq``: a judgement, kept apart from what was measured.

    ``metrics``: ``forecast/...``; ``body`` what is no number. See :class:`rlwatch.forecast.Forecast`.
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
    """Somebody has taken an alert on: no repeats and no escalation, unless it gets worse than ``severity``."""

    alert_id: str
    run_id: str
    by: str
    why: str = ""
    at: float = 0.0
    severity: Severity = Severity.CRITICAL


@dataclass(frozen=True, slots=True)
class Silence:
    """Nobody is told of alerts that fit until then. Fields that are empty fit all; the others must all fit.

    ``run`` is a run's id or name; ``labels`` those of the rule. ``until`` in the past: it is over. ``alerts``: only
    these (ids): somebody snoozed them. ``up_to``: what gets worse than that is told all the same; None: nothing is.
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
    """One thing that a person did, or had to say: who, when, and in words. ``act``: ``note``, ``acknowledge``,
    ``silence``... ``run_id`` and ``alert_id`` where it concerns one.
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
    """A person's answer to "was the forecast at this step right?": something did go wrong, or nothing did."""

    run_id: str
    step: int
    right: bool
    by: str
    why: str = ""
    at: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """A message on its way to one notifier channel. ``channel`` is a name from the configuration: the
    address and its secret are never stored.
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
    """The alerts of a run (or of several), what was written to whom about them, and who took them on."""

    alerts: tuple[Alert, ...] = ()
    messages: tuple[OutboxMessage, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A person's wish for the live run, as a row. ``kind`` is e.g. ``reset-reference``; ``args`` e.g.
    ``{"optimizer": "clear" | "keep"}``; ``force`` overrules vetoes that may be overruled.
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
