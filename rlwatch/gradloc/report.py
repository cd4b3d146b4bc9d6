"""What localisation says of one step. Plain numbers: nothing here holds a tensor or waits for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlwatch.gradloc.traced import Trace


class Cause(StrEnum):
    """Why a culprit is one, in the order in which they are tried: the three published classes, and two more."""

    NON_FINITE = "non-finite"
    TOKEN_RATIO = "token ratio"  # noqa: S105  (no password)
    SEQUENCE_RATIO = "sequence ratio"
    REWARD_OUTLIER = "reward outlier"
    LAYER = "layer"
    UNEXPLAINED = "unexplained"


class Method(StrEnum):
    """How the contributions were found."""

    FD = "fd"
    RICHARDSON = "richardson"
    JVP = "jvp"
    BISECTION = "bisection"
    TRACE = "trace"


@dataclass(frozen=True, slots=True, order=True)
class TokenAt:
    """Where a token is: the micro-batch of the step on its rank, its sequence in it, its position in the response."""

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
    """One token to blame.

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
    """What it took: passes of the whole step, backwards of single sequences, and seconds of wall time."""

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
