"""What a loop does not tell rlwatch, so that what cannot be measured says why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlwatch.integrations.level import Level

Needs = tuple[tuple[str, ...], ...]
"""All of these; of each the one or the other."""

TAKEN_BY = {
    "rewards": "rollouts(rewards=)",
    "groups": "rollouts(groups=)",
    "lengths": "rollouts(lengths=)",
    "cut": "rollouts(cut=)",
    "loss": "step(loss=)",
    "lr": "step(lr=)",
    "grad_norm": "step(grad_norm=)",
    "gradients": "gradients()",
    "clip": "Watcher(clip=)",
    "optimizer": "Watcher(optimizer=)",
}
"""Where an input is passed; all others go to ``observe``."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the metrics of a name need, and from which level on they are measured."""

    needs: Needs
    level: Level = Level.TOKENS


SUBJECTS = {
    "policy/logp": Subject((("logp", "logits"), ("mask",))),
    "policy/entropy": Subject((("entropy", "logits"),)),
    "policy/kl_ref": Subject((("ref_logp",),)),
    "ratio/": Subject((("old_logp",),)),
    "ratio/clipfrac": Subject((("clip",), ("old_logp",), ("advantages",))),
    "offpolicy/": Subject((("advantages",), ("old_logp", "rollout_logp"))),
    "mismatch/": Subject((("rollout_logp",),)),
    "adv/": Subject((("advantages",),)),
    "lld/": Subject((("advantages",),), Level.FULL),
    "text/repetition": Subject((("ids",),), Level.FULL),
    "reward/mean": Subject((("rewards",),), Level.SCALARS),
    "reward/zero_std_frac": Subject((("rewards",), ("groups",)), Level.SCALARS),
    "len/mean": Subject((("lengths",),), Level.SCALARS),
    "len/clipped": Subject((("lengths",), ("cut",)), Level.SCALARS),
    "optim/grad_norm": Subject((("gradients", "grad_norm"),), Level.SCALARS),
    "grad_layer/": Subject((("gradients",),), Level.GRADIENTS),
    "optim/lr": Subject((("optimizer", "lr"),), Level.SCALARS),
    "loss/": Subject((("loss",),), Level.SCALARS),
}
"""Beginning of metric names -> what they need."""


@dataclass(slots=True)
class Gaps:
    """Keeps book of what was given, refused and measured."""

    level: Level
    given: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)

    def note(self, names: Iterable[str]) -> None:
        """Metrics that were measured."""
        self.measured.update(names)

    def reasons(self) -> dict[str, str]:
        """Beginning of metric names -> why nothing of that name was measured yet."""
        return {start: self._reason(subject) for start, subject in SUBJECTS.items() if not self._seen(start)}

    def _seen(self, start: str) -> bool:
        return any(name.startswith(start) for name in self.measured)

    def _reason(self, subject: Subject) -> str:
        if not self.level.includes(subject.level):
            return f"level is {self.level.value!r}; this begins with {subject.level.value!r}"
        for choice in subject.needs:
            refused = [f"{name}= was refused: {self.refused[name]}" for name in choice if name in self.refused]
            if refused:
                return "; ".join(refused)
            if self.given.isdisjoint(choice):
                return "never given: " + " or ".join(TAKEN_BY.get(name, f"observe({name}=)") for name in choice)
        return "there was nothing in it: no token inside a mask, or no finite gradient"
