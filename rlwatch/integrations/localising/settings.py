"""How spikes of the gradient are localised: what a user may choose."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlwatch.clipping.skip import SkipOnSpike
from rlwatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Localise:
    """When a step's gradient is localised, how closely, and at what price.

    Parameters
    ----------
    culprits
        Tokens named at most. Twice as many candidates by contribution and by screen are verified.
    context
        Tokens kept on each side of a culprit in its response, for the view of the response.
    share, allowance_s
        Part of the training time that localisation may take, amortised (0.01 is 1 %), and seconds it may take beyond
        that before much training time has passed.
    threshold
        Fixed threshold on the norm of a single token's gradient (METHODS: T_tok), in place of the run's own level.
        Published runs use 100 to 640 (GradLoc, Tencent Hunyuan 2026).
    keep_inputs
        Directory into which every localised step is written, so that it can be replayed: it holds all its token ids.
        None: nothing is written.
    skip
        Leave out the optimizer step of a batch with a culprit. None: never; then training is not changed.
    """

    culprits: int = 8
    context: int = 256
    share: float = 0.01
    allowance_s: float = 30.0
    threshold: float | None = None
    keep_inputs: str | os.PathLike[str] | None = None
    skip: SkipOnSpike | None = None

    def __post_init__(self) -> None:
        for name, least in (("culprits", 1), ("context", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"localise: {name} must be an integer of at least {least}, got {value!r}")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < 1:
            raise ConfigError(f"localise: share is a part of the training time within (0, 1), got {self.share!r}")
        if self.threshold is not None and not (isinstance(self.threshold, int | float) and self.threshold > 0):
            raise ConfigError(f"localise: threshold must be a number above 0, got {self.threshold!r}")
        if self.skip is not None and not isinstance(self.skip, SkipOnSpike):
            raise ConfigError(f"localise: skip must be SkipOnSpike(...) or None, got {self.skip!r}")

    @classmethod
    def of(cls, wish: bool | Localise) -> Localise | None:
        """None for False, the defaults for True, else ``wish`` itself. Raises ``ConfigError`` for anything else."""
        if isinstance(wish, cls):
            return wish
        if isinstance(wish, bool):
            return cls() if wish else None
        raise ConfigError(f"localise must be True, False or Localise(...), got {wish!r}")

    @property
    def directory(self) -> Path | None:
        """Where replays are written."""
        return None if self.keep_inputs is None else Path(self.keep_inputs)
