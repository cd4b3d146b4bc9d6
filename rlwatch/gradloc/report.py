"""Report on the localisation of one step's gradient: plain numbers and names, without tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlwatch.wording import number


class BlameLevel(StrEnum):
    """Part of a step that is blamed for its gradient: a token, a response, a prompt group ... the smallest that
    explains most of it.
    """

    TOKEN = "token"  # noqa: S105  (no password)
    STRETCH = "stretch"
    RESPONSE = "response"
    GROUP = "prompt group"
    TASK = "task"
    RANK = "rank"
    BATCH = "batch-wide"
    """No culprit: all tokens grew alike, or there are no outliers."""
    LAYER = "layer"
    OUTSIDE = "not from tokens"
    """Most of the gradient does not come through the log-probs of the tokens."""
    NON_FINITE = "non-finite"
    NOT_RECURRED = "did not recur"
    """A number was not finite, and all numbers are finite when the step is repeated."""
    NONE = ""
    """The level is not known."""


class ExcessFactor(StrEnum):
    """Factor of the loss that may explain why the gradient of a token, or of the whole step, is larger than usual.

    Three are those of the published method (GradLoc, Tencent Hunyuan 2026); the others are further ones.
    """

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
    """Method by which contributions of tokens were computed."""

    FD = "fd"
    RICHARDSON = "richardson"
    JVP = "jvp"
    REVERSE = "reverse"
    BISECTION = "bisection"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, order=True)
class TokenAt:
    """Place of a token: rank, micro-batch of the step on that rank, sequence in the micro-batch, position in the
    response.
    """

    rank: int
    microbatch: int
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """Gradient of one token alone, by an exact backward pass.

    ``norm`` is in the unit of the step's norm (with all scaling of the loss, and divided by the number of ranks as
    gradients are). ``layers`` are shares of ``norm**2`` and sum up to 1.
    """

    norm: float
    layers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Culprit:
    """An outlying token in the step's gradient.

    ``contribution`` is signed, in the unit of the gradient norm; ``share`` = contribution / norm. Both are None if
    there is no direction (non-finite gradients) or the search does not compute them (bisection). ``own`` is None if the
    token was not verified. ``numbers`` are the known quantities of the token: ``logp``, ``old_logp``, ``rollout_logp``,
    ``ref_logp``, ``entropy`` (nats), ``ratio``, ``advantage``, ``reward``, ``coefficient``; absent = not known. ``why``
    is the reason in one sentence.
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
    """Part of the gradient that belongs to one response, prompt group, task or rank, or to all others together.

    ``share`` = ``up`` + ``down``, as shares of the gradient norm: the part along the gradient, and the part that
    cancels (<= 0). The shares of all units of a report sum up to 1 except for the gap of the attribution.
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

    ``kind`` and ``value`` are for programs: ``clip advantages`` at a size, ``clip ratios`` and ``truncate weights`` at
    a factor, ``mask`` (the outlying tokens), ``mask responses`` (the responses with such tokens), ``rescale
    advantages``, ``rescale loss`` and ``rescale KL`` by a factor, ``clip KL`` at nats, ``without the term``, ``clip
    layer`` at a norm. ``action`` is for people; it is continued by "the norm goes from ``before`` to ``after``".
    """

    kind: str
    value: float | None
    action: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a localisation: forward passes of the whole step, backward passes of single sequences, and seconds of
    wall time.
    """

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Localisation:
    """Report on the localisation of one step's gradient.

    Parameters
    ----------
    norm
        The step's gradient norm, before clipping; may be NaN or Inf.
    threshold
        Threshold with which the norm was compared; None if the report was requested.
    tokens
        Number of response tokens in the step, over all ranks.
    method, gap
        Method of attribution; (sum of contributions - norm) / norm, signed: 0 is complete. None if nothing was
        attributed.
    complete
        True if ``gap`` is within tolerance.
    culprits
        Outlying tokens, worst first.
    layers
        Share of each layer in ``norm**2``; sums up to 1.
    why_not
        Reason why tokens were not localised: one sentence, empty if they were.
    message
        Summary of the findings, in one sentence.
    trace
        The first number that is not finite, if the gradient has no direction.
    notes
        Checks that were not possible, and methods that were tried before, in the order of trying.
    verdict
        Level at which the gradient is blamed on something; :attr:`BlameLevel.NONE` if it is not known.
    statement, because, remedy
        The verdict, its cause and its cure in words, each a part of a sentence; empty if not known.
    cures
        Changes of the loss, with the norm that each would have led to, the one that fits the cause first.
    units
        Parts of the gradient at the level of the verdict: the largest, and all others, whose shares add up.
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
    """Kind of the first non-finite tensor, in the order in which kinds are searched."""

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
    """Link of the chain gradient -> parameters -> rollout -> log-probs at which a non-finite number first appeared."""

    BACKWARD = "backward"
    """The forward pass is finite; the loss's own arithmetic, or the backward pass, overflowed."""
    FORWARD = "forward"
    """The weights are finite, but their forward pass is not."""
    WEIGHTS = "weights"
    """The weights were broken before this step: by an earlier step, by loading, or by synchronisation."""
    ENGINE = "engine"
    """Only the rollout engine is affected: weight synchronisation, a race, quantisation."""
    DATA = "data"
    """Misaligned or truncated tokens: log-ratios are beyond any that a policy update causes."""
    REWARD = "reward"
    """A reward, or the computation of advantages from rewards."""
    CHANCE = "chance"
    """No link: all numbers are finite when the step is repeated. The cause is hardware, a kernel or a race."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NonfiniteTrace:
    """The first non-finite tensor of a step, and the other quantities that are not finite.

    Parameters
    ----------
    kind, name
        Kind and name of that tensor: ``name`` is that of a parameter or module, of an input (``old_logp``), or of the
        quantity that the coefficients belong to (``logp``, ``entropy``, ``aux``). :attr:`TensorKind.NOTHING` if none
        was found on this rank.
    message
        Description in one sentence.
    origin
        Start of the chain, derived from which quantities are finite.
    layer
        Layer of a parameter or module, as in gradient norms per layer.
    at, token_id
        The first token concerned, if there is one; for an embedding row, ``token_id`` alone.
    index, dtype, count
        Index of the tensor's first non-finite element, its type, and the number of such elements (of inputs and
        coefficients: inside the mask, over all micro-batches of this rank).
    tokens
        The tokens concerned, at most :data:`MOST_TOKENS`; for coefficients and inputs only.
    chain
        Links of the chain that are broken in this step, in order of time.
    broken
        Number of non-finite elements of each quantity inside the mask; ``gradients`` and ``parameters`` count tensors.
        Elements outside the mask are counted under the same name with ``(padding)``.
    id0_frac
        Share of responses that are at least 90 % token id 0, as a sampler writes them from NaN logits; None: no ids.
    elsewhere
        True if another rank found a non-finite tensor and this one did not.
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
        """Return True if a non-finite tensor was found on this rank."""
        return self.kind is not TensorKind.NOTHING


MOST_TOKENS = 64
"""Largest number of tokens that are named: one bad parameter breaks all tokens, and then their names are no clue."""


# The exception for a localisation that is not possible. It reaches no training loop: it becomes
# ``Localisation.why_not``.


class NotLocalised(Exception):  # noqa: N818  (an answer, not a fault)
    """Signal that the tokens of this step cannot be localised. Its text is the reason, in one sentence.

    With several ranks it is raised on all of them or on none.
    """


# A localisation in words: verdict, cause and cure, each a part of one sentence.


def remedy_of(cures: Sequence[Cure]) -> str:
    """Return the first of ``cures`` with a finite norm as text, such as "with advantages clipped at 2.4 the norm goes
    from 412 to 1.3".

    Empty if there is none.
    """
    known = [cure for cure in cures if math.isfinite(cure.after)]
    if not known:
        return ""
    first = known[0]
    return f"{first.action} the norm goes from {number(first.before)} to {number(first.after)}"


def message_of(report: Localisation) -> str:
    """Return verdict, cause and cure of a report in one line."""
    cause = f": {report.because}" if report.because else ""
    cure = f"; {report.remedy}" if report.remedy else ""
    return f"{report.statement}{cause}{cure}" if report.statement else ""
