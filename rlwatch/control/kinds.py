"""What a live run can be asked to do: every kind of command, its arguments and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.control.arguments import Argument, Choice, Number, Step, checked
from rlwatch.errors import ConfigError
from rlwatch.records import JSON


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of command. ``vetoed``: the trainer may refuse it in a collapse, which ``force`` overrules."""

    name: str
    meaning: str
    args: Mapping[str, Argument] = field(default_factory=dict)
    vetoed: bool = False

    def read(self, given: Mapping[str, JSON]) -> dict[str, JSON]:
        """All arguments, with defaults for those not given. Raises ``ConfigError`` for what is wrong or unknown."""
        for name in given:
            if name not in self.args:
                takes = f"it takes: {', '.join(sorted(self.args))}" if self.args else "it takes none"
                raise ConfigError(f"{self.name} has no argument {name!r}; {takes}")
        return {
            name: checked(self.name, name, argument, given.get(name, argument.default))
            for name, argument in self.args.items()
        }


_ALL = (
    Kind(
        "reset-reference",
        "the policy as it is at the next safe boundary becomes its own reference: KL starts again from 0",
        {"optimizer": Choice(("clear", "keep"), "the optimizer's state: cleared (ProRL v1) or kept (ProRL v2)")},
        vetoed=True,
    ),
    Kind("save-checkpoint", "the trainer saves a checkpoint, as it would by its own schedule", vetoed=True),
    Kind(
        "lower-lr",
        "the learning rate becomes a fraction of what the schedule says; 1 gives it back to the schedule",
        {
            "scale": Number("fraction of the scheduled learning rate", high=1.0, above=True),
            "until": Step("the step from which the schedule rules again"),
        },
    ),
    Kind(
        "set-kl-coef",
        "the coefficient of the KL term (beta) becomes this value",
        {"value": Number("the new coefficient")},
        vetoed=True,
    ),
    Kind(
        "pause",
        "training waits at the next safe boundary",
        {"minutes": Number("the longest it waits", high=1440.0, above=True, default=60.0, unit="minutes")},
    ),
    Kind("resume", "a paused training goes on"),
    Kind(
        "stop",
        "training ends at the next safe boundary, as if it had reached its last step",
        {"save": Choice(("yes", "no"), "whether a checkpoint is saved first")},
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
"""Every kind of command by name."""


def kind_of(name: str) -> Kind:
    """The kind called ``name``. Raises ``ConfigError`` naming those there are."""
    if name not in KINDS:
        raise ConfigError(f"unknown command {name!r}; known: {', '.join(sorted(KINDS))}")
    return KINDS[name]
