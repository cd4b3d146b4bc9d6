"""What is said of a step whose gradient is not finite: plain numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rlwatch.gradloc.report import Cost, TokenAt


class Kind(StrEnum):
    """What the first non-finite tensor is, in the order of looking."""

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
    """Where the chain gradient -> parameters -> rollout -> log-probs was entered."""

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
        Where the chain was entered, by the signatures of METHODS.
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
        """Whether something not finite was found on this rank."""
        return self.kind is not Kind.NOTHING


MOST_TOKENS = 64
"""Tokens named at most: one bad parameter breaks all of them, and then their names say nothing."""
