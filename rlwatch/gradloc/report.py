"""The report on one step: plain numbers and names, nothing that holds a tensor or waits for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """Classes of culprits, in the order in which they are tried: the three published ones, and two more."""

    NON_FINITE = "non-finite"
    TOKEN_RATIO = "token ratio"  # noqa: S105  (no password)
    SEQUENCE_RATIO = "sequence ratio"
    REWARD_OUTLIER = "reward outlier"
    LAYER = "layer"
    UNEXPLAINED = "unexplained"


class Method(StrEnum):
    """Ways of computing contributions."""

    FD = "fd"
    RICHARDSON = "richardson"
    JVP = "jvp"
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
    """A token that stands out in the step's gradient.

    ``contribution`` is signed, in the unit of the gradient norm; ``share`` = contribution / norm. Both are None where
    there is no direction (non-finite gradients) or the search does not give them (bisection). ``own`` is None where
    the token was not verified. ``numbers`` are what is known of the token: ``logp``, ``old_logp``, ``rollout_logp``,
    ``ref_logp``, ``entropy`` (nats), ``ratio``, ``advantage``, ``reward``, ``coefficient``; absent = not known.
    """

    at: TokenAt
    sequence: int
    token_id: int | None
    cause: Cause
    why: str
    contribution: float | None = None
    share: float | None = None
    own: OwnGradient | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


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
        What it was compared with; None if somebody asked.
    tokens
        Response tokens of the step, all ranks.
    method, gap
        How the contributions were found; (sum of contributions - norm) / norm, signed: 0 is complete. None where
        nothing was attributed.
    complete
        Whether ``gap`` is within tolerance.
    culprits
        Worst first.
    layers
        Share of each layer in ``norm**2``; sums up to 1.
    why_not
        Why tokens were not localised: one sentence, empty if they were.
    message
        What was found, in one sentence.
    trace
        Where the first number that is not finite was, if the gradient has no direction.
    notes
        What could not be checked, and what was tried before, in the order of trying.
    """

    norm: float
    threshold: float | None = None
    tokens: int = 0
    method: Method | None = None
    gap: float | None = None
    complete: bool = False
    culprits: Sequence[Culprit] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    cause: Cause = Cause.UNEXPLAINED
    why_not: str = ""
    message: str = ""
    trace: Trace | None = None
    notes: Sequence[str] = ()
    cost: Cost = field(default_factory=Cost)


# A step whose gradient is not finite.


class Kind(StrEnum):
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
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Trace:
    """The first non-finite tensor of a step, and what else is not finite.

    Parameters
    ----------
    kind, name
        What that tensor is: ``name`` is that of a parameter or module, of an input (``old_logp``), or of what the
        coefficients belong to (``logp``, ``entropy``, ``aux``). :attr:`Kind.NOTHING` where none was found here.
    message
        One sentence.
    origin
        Where the chain was entered, by what beside it is finite and what is not.
    layer
        That of a parameter or module, as in gradient norms per layer.
    at, token_id
        The first token concerned, where it is one; of an embedding row, ``token_id`` alone.
    index, dtype, count
        Where in the tensor the first non-finite element is, its type, and how many there are (of inputs and
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
        Whether another rank found something where this one did not.
    notes
        What could not be looked at.
    """

    kind: Kind
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
        return self.kind is not Kind.NOTHING


MOST_TOKENS = 64
"""Tokens named at most: one bad parameter breaks all of them, and then their names say nothing."""


# The end of a localisation that cannot be made: it reaches no training loop, but becomes ``Localisation.why_not``.


class NotLocalised(Exception):  # noqa: N818  (an answer, not a fault)
    """The tokens of this step cannot be localised. Its text says why, in one sentence.

    Where there are several ranks it is raised on all of them or on none.
    """


# A localisation in one sentence.


def summary_of(report: Localisation) -> str:
    """Summary of a step whose tokens were attributed or searched."""
    if not report.culprits:
        return "no token has a gradient"
    if report.cause is Cause.LAYER and report.layers:
        layer = max(report.layers, key=report.layers.__getitem__)
        return f"{layer} holds {report.layers[layer]:.0%} of the squared gradient norm; no single token stands out"
    worst, count = report.culprits[0], len(report.culprits)
    others = f" ({count - 1} more stand out)" if count > 1 else ""
    if worst.share is None:
        return f"one token of sequence {worst.sequence} has the largest gradient{others}: {worst.why}"
    place = f"at position {worst.at.position} of sequence {worst.sequence}"
    return f"one token {place} contributes {worst.share:.0%} of the gradient norm{others}: {worst.why}"
