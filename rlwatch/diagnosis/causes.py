"""A cause: what most likely set a run's failure off, its evidence in time order, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlwatch.diagnosis.actions import Action
from rlwatch.diagnosis.chains import Chain
from rlwatch.diagnosis.signs import Sign
from rlwatch.records import JSON, Severity

PASSED = 3
"""So many earlier signs of a kind without consequence, and one more says little."""


class Sureness(StrEnum):
    """How sure a cause is: ``strong`` > ``plausible`` > ``weak``."""

    STRONG = "strong"
    PLAUSIBLE = "plausible"
    WEAK = "weak"

    @property
    def rank(self) -> int:
        """2, 1, 0: for comparing."""
        return ("weak", "plausible", "strong").index(self.value)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that happened, in the order it did: a sign, or an event of the run (``kind`` then is the event's)."""

    step: int
    text: str
    kind: str
    severity: Severity | None = None
    seen_step: int | None = None
    metric: str = ""
    message: str = ""

    def to_dict(self) -> dict[str, JSON]:
        """Plain values."""
        return {
            "step": self.step,
            "text": self.text,
            "kind": self.kind,
            "severity": self.severity.value if self.severity is not None else None,
            "seen_step": self.seen_step,
            "metric": self.metric,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Cause:
    """What may have set it off.

    ``kind`` is that of the first sign; ``summary`` the chain in one sentence; ``why`` the reasons for
    ``sure``; ``symptoms`` the kinds that followed; ``withheld`` says which advice was left out, and why.
    """

    kind: str
    title: str
    onset_step: int
    sure: Sureness
    why: str
    summary: str
    evidence: tuple[Evidence, ...]
    symptoms: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    withheld: str = ""

    def to_dict(self) -> dict[str, JSON]:
        """Plain values."""
        return {
            "kind": self.kind,
            "title": self.title,
            "onset_step": self.onset_step,
            "sure": self.sure.value,
            "why": self.why,
            "summary": self.summary,
            "symptoms": list(self.symptoms),
            "evidence": [evidence.to_dict() for evidence in self.evidence],
            "actions": [action.to_dict() for action in self.actions],
            "withheld": self.withheld,
        }


@dataclass(frozen=True, slots=True)
class Case:
    """What speaks for one cause: its chains (one for each time it began), and what else there is to weigh.

    ``passed``: signs of the same cause that nothing followed. ``rivals``: titles of causes that explain
    the worst sign too and began at about the same time.
    """

    chain: Chain
    also: tuple[Chain, ...]
    passed: int
    rivals: tuple[str, ...]
    slack: int

    @property
    def bad(self) -> bool:
        """More than remarks."""
        return any(sign.bad for sign in (self.chain.root, *self.chain.effects))

    @property
    def clear(self) -> list[Sign]:
        """Bad effects whose onset is later than the root's by more than onsets may be off."""
        return [e for e in self.chain.effects if e.bad and e.onset_step > self.chain.root.onset_step + self.slack]

    @property
    def early(self) -> list[Sign]:
        """Bad effects that were there clearly before the root: symptoms noticed first."""
        return [e for e in self.chain.effects if e.bad and e.onset_step < self.chain.root.onset_step - self.slack]

    def judged(self) -> tuple[Sureness, str]:
        """How sure, and the reasons in one sentence."""
        root, clear = self.chain.root, self.clear
        if root.entry.symptom:
            return (
                Sureness.WEAK,
                f"{root.entry.title.lower()} first, which is usually a symptom: no sign came before it",
            )
        sure, why = self._by_order(root, clear)
        if self.passed >= PASSED and sure is not Sureness.WEAK:
            return Sureness.WEAK, f"{why}; but {self.passed} earlier such signs passed without consequence"
        if self.early and sure is not Sureness.WEAK:
            first = self.early[0]
            steps = root.onset_step - first.onset_step
            return (
                Sureness.PLAUSIBLE,
                f"it explains what was found, though {first.entry.happened} {steps} steps earlier",
            )
        if self.rivals and sure is Sureness.STRONG:
            return Sureness.PLAUSIBLE, f"{why}; but it began at about the same time as: {', '.join(self.rivals)}"
        return sure, why

    def _by_order(self, root: Sign, clear: Sequence[Sign]) -> tuple[Sureness, str]:
        kinds, critical = {sign.kind for sign in clear}, root.severity is Severity.CRITICAL
        first = f"{self._place()}, {clear[0].onset_step - root.onset_step} steps before the next sign" if clear else ""
        if clear and not root.bad:
            sure = Sureness.PLAUSIBLE if len(kinds) >= 2 else Sureness.WEAK
            return sure, f"{first}; but it is only a remark by itself"
        if len(kinds) >= 2 or (clear and critical):
            return Sureness.STRONG, f"{first}, and {_effects(clear)} known to follow from it"
        if clear:
            return Sureness.PLAUSIBLE, f"{first}; one effect alone may be chance"
        return self._alone(root, critical=critical)

    def _alone(self, root: Sign, *, critical: bool) -> tuple[Sureness, str]:
        """Without an effect that came clearly later."""
        if root.bad and any(effect.bad for effect in self.chain.effects):
            return Sureness.PLAUSIBLE, "its effects began at about the same time, so the order is not certain"
        if critical:
            return Sureness.PLAUSIBLE, "it is critical by itself; nothing else was found before or after it"
        level = "warning" if root.bad else "remark"
        return Sureness.WEAK, f"it is a {level} by itself; nothing followed from it so far"

    def _place(self) -> str:
        """``it came first``, if it did by more than onsets may be off."""
        near = [e for e in self.chain.effects if e.bad and abs(e.onset_step - self.chain.root.onset_step) <= self.slack]
        return f"it began at about the same time as {near[0].entry.title.lower()}" if near else "it came first"


def _effects(clear: Sequence[Sign]) -> str:
    kinds = list(dict.fromkeys(sign.kind for sign in clear))
    return f"{len(kinds)} effects are" if len(kinds) > 1 else "what followed is"
