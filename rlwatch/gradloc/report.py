"""The report on one step: plain numbers and names, nothing that holds a tensor or waits for a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlwatch.wording import number


class BlameLevel(StrEnum):
    """Levels at which a gradient can be blamed on something, the one that explains most with least."""

    TOKEN = "token"  # noqa: S105  (no password)
    STRETCH = "stretch"
    RESPONSE = "response"
    GROUP = "prompt group"
    TASK = "task"
    RANK = "rank"
    BATCH = "batch-wide"
    """No culprit: everything grew alike, or there are no outliers."""
    LAYER = "layer"
    OUTSIDE = "not from tokens"
    """The most of the gradient does not come through the log-probs of the tokens."""
    NON_FINITE = "non-finite"
    NOT_RECURRED = "did not recur"
    """A number was not finite, and all of them are when the step is run again."""
    NONE = ""
    """Not known."""


class ExcessFactor(StrEnum):
    """Factors that may carry the excess of a culprit, or of the step: the three published ones, and more."""

    NON_FINITE = "non-finite"
    TOKEN_RATIO = "token ratio"  # noqa: S105  (no password)
    SEQUENCE_RATIO = "sequence ratio"
    IMPORTANCE_WEIGHT = "importance weight"
    REWARD_OUTLIER = "reward outlier"
    KL_TERM = "KL term"
    ADVANTAGE_SCALE = "advantage scale"
    NORMALISER = "normaliser"
    ENTROPY_TERM = "entropy term"
    OTHER_TERM = "another term"
    LOGP_GRADIENT = "log-prob gradient"
    LAYER = "layer"
    NOT_RECURRED = "did not recur"
    UNEXPLAINED = "unexplained"


class Method(StrEnum):
    """Ways of computing contributions."""

    FD = "fd"
    RICHARDSON = "richardson"
    JVP = "jvp"
    REVERSE = "reverse"
    BISECTION = "bisection"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, order=True)
class TokenAt:
    """Place of a token: the micro-batch of the step on its rank, its sequence in it, its position in the response."""

    rank: int
    microbatch: int
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A token's own gradient by an exact backward of it alone.

    ``norm`` is in the unit of the step's norm (with all scaling of the loss, and divided by the number of ranks as
    gradients are); ``layers`` are shares of ``norm**2`` and sum up to 1.
    """

    norm: float
    layers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Culprit:
    """An outlying token in the step's gradient.

    ``contribution`` is signed, in the unit of the gradient norm; ``share`` = contribution / norm. Both are None where
    there is no direction (non-finite gradients) or the search does not give them (bisection). ``own`` is None where
    the token was not verified. ``numbers`` are what is known of the token: ``logp``, ``old_logp``, ``rollout_logp``,
    ``ref_logp``, ``entropy`` (nats), ``ratio``, ``advantage``, ``reward``, ``coefficient``; absent = not known.
    """

    at: TokenAt
    sequence: int
    token_id: int | None
    cause: ExcessFactor
    why: str
    contribution: float | None = None
    share: float | None = None
    own: OwnGradient | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that holds a part of the gradient: a response, a prompt group, a task, a rank, or what is left.

    ``share`` = ``up`` + ``down``, of the gradient norm: what pushes along the gradient, and what cancels (<= 0). The
    shares of all units of a report sum up to 1 but for the gap.
    """

    level: BlameLevel
    name: str
    share: float
    up: float
    down: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Cure:
    """A change of the loss, and the gradient norm that this step would have had with it.

    ``kind`` and ``value`` are for programs: ``clip advantages`` at a size, ``clip ratios`` and ``truncate weights``
    at a factor, ``mask`` (the culprits; ``mask responses``, theirs), ``rescale advantages``, ``rescale loss`` and
    ``rescale KL`` by a factor, ``clip KL`` at nats, ``without the term``, ``clip layer`` at a norm. ``action`` is for
    people, in words that go on with "the norm goes from ``before`` to ``after``".
    """

    kind: str
    value: float | None
    action: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a localisation: passes of the whole step, backwards of single sequences, and seconds of wall time."""

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Localisation:
    """The report on one step.

    Parameters
    ----------
    norm
        The step's gradient norm, before clipping; NaN or Inf where it was that.
    threshold
        Threshold the norm was compared with; None if the report was requested.
    tokens
        Response tokens of the step, all ranks.
    method, gap
        Method of attribution; (sum of contributions - norm) / norm, signed: 0 is complete. None if
        nothing was attributed.
    complete
        True if ``gap`` is within tolerance.
    culprits
        Worst first.
    layers
        Share of each layer in ``norm**2``; sums up to 1.
    why_not
        Reason why tokens were not localised: one sentence, empty if they were.
    message
        Summary of the findings, in one sentence.
    trace
        The first number that is not finite, if the gradient has no direction.
    notes
        Checks that were not possible, and what was tried before, in the order of trying.
    verdict
        The level at which the gradient is to be blamed on something; :attr:`BlameLevel.NONE` where that is not known.
    statement, because, remedy
        The verdict, its cause and its cure in words, each the part of a sentence; empty where not known.
    cures
        Changes of the loss and what they would have made of the norm, the one that fits the cause first.
    units
        Parts of the gradient at the level of the verdict: the largest, and the rest, whose shares add up.
    count
        Number of outlying tokens, including those that are not among ``culprits``.
    explained
        Share of the excess of all outlying tokens that ``culprits`` hold; None if there are none.
    grew
        Ratio of each scale of the step to its usual size in this run, if that is known.
    """

    norm: float
    threshold: float | None = None
    tokens: int = 0
    method: Method | None = None
    gap: float | None = None
    complete: bool = False
    culprits: Sequence[Culprit] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    cause: ExcessFactor = ExcessFactor.UNEXPLAINED
    why_not: str = ""
    message: str = ""
    trace: NonfiniteTrace | None = None
    notes: Sequence[str] = ()
    cost: Cost = field(default_factory=Cost)
    verdict: BlameLevel = BlameLevel.NONE
    statement: str = ""
    because: str = ""
    remedy: str = ""
    cures: Sequence[Cure] = ()
    units: Sequence[Unit] = ()
    count: int = 0
    explained: float | None = None
    grew: Mapping[str, float] = field(default_factory=dict)


# A step whose gradient is not finite.


class TensorKind(StrEnum):
    """Kinds of tensors that may be the first non-finite one, in the order of looking."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    LOGP = "log-probs"
    COEFFICIENT = "coefficient"
    ACTIVATION = "activation"
    OUTPUT_GRADIENT = "output gradient"
    PADDING = "padding"
    GRADIENT = "gradient"
    NOTHING = "nothing"


class Origin(StrEnum):
    """Links at which the chain gradient -> parameters -> rollout -> log-probs may be entered."""

    BACKWARD = "backward"
    """Finite going forward; the loss's own arithmetic, or the backward pass, overflowed."""
    FORWARD = "forward"
    """Finite weights whose forward pass is not."""
    WEIGHTS = "weights"
    """Weights broken before this step: by an earlier one, by loading, or by synchronisation."""
    ENGINE = "engine"
    """The rollout engine alone: weight synchronisation, a race, quantisation."""
    DATA = "data"
    """Misaligned or truncated tokens: log-ratios beyond any that a policy update makes."""
    REWARD = "reward"
    """A reward, or how advantages are made of rewards."""
    CHANCE = "chance"
    """Nowhere: all numbers are finite when the step is run again. Hardware, a kernel or a race."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NonfiniteTrace:
    """The first non-finite tensor of a step, and what else is not finite.

    Parameters
    ----------
    kind, name
        That tensor: ``name`` is that of a parameter or module, of an input (``old_logp``), or of the quantity that the
        coefficients belong to (``logp``, ``entropy``, ``aux``). :attr:`TensorKind.NOTHING` if none was found here.
    message
        One sentence.
    origin
        Start of the chain, derived from which quantities are finite.
    layer
        Layer of a parameter or module, as in gradient norms per layer.
    at, token_id
        The first token concerned, if it is one; for an embedding row, ``token_id`` alone.
    index, dtype, count
        Index of the tensor's first non-finite element, its type, and how many there are (of inputs and
        coefficients: inside the mask, over all micro-batches of this rank).
    tokens
        The tokens concerned, at most :data:`MOST_TOKENS`; for coefficients and inputs only.
    chain
        Links of the chain that are broken in this step, in order of time.
    broken
        How many elements of each quantity are not finite inside the mask; ``gradients`` and ``parameters`` count
        tensors. Outside the mask: under the same name with ``(padding)``.
    id0_frac
        Share of responses that are at least 90 % token id 0, as a sampler fed with NaN writes them; None: no ids.
    elsewhere
        True if another rank found something and this one did not.
    notes
        Checks that were not possible.
    """

    kind: TensorKind
    name: str
    message: str
    origin: Origin = Origin.UNKNOWN
    layer: str = ""
    at: TokenAt | None = None
    token_id: int | None = None
    index: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 0
    tokens: Sequence[TokenAt] = ()
    chain: Sequence[str] = ()
    broken: Mapping[str, int] = field(default_factory=dict)
    id0_frac: float | None = None
    elsewhere: bool = False
    notes: Sequence[str] = ()
    cost: Cost = field(default_factory=Cost)

    @property
    def found(self) -> bool:
        """True where something not finite was found on this rank."""
        return self.kind is not TensorKind.NOTHING


MOST_TOKENS = 64
"""Largest number of tokens that are named: one bad parameter breaks all of them, and then their names are no clue."""


# The end of a localisation that cannot be made: it reaches no training loop, but becomes ``Localisation.why_not``.


class NotLocalised(Exception):  # noqa: N818  (an answer, not a fault)
    """The tokens of this step cannot be localised. Its text has the reason, in one sentence.

    Where there are several ranks it is raised on all of them or on none.
    """


# A localisation in words: verdict, cause and cure, each a part of one sentence.


def remedy_of(cures: Sequence[Cure]) -> str:
    """``with advantages clipped at 2.4 the norm goes from 412 to 1.3``; empty where no cure is known."""
    known = [cure for cure in cures if math.isfinite(cure.after)]
    if not known:
        return ""
    first = known[0]
    return f"{first.action} the norm goes from {number(first.before)} to {number(first.after)}"


def message_of(report: Localisation) -> str:
    """Verdict, cause and cure in one line."""
    cause = f": {report.because}" if report.because else ""
    cure = f"; {report.remedy}" if report.remedy else ""
    return f"{report.statement}{cause}{cure}" if report.statement else ""
