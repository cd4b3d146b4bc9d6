"""NaN and infinity: where, how many at once, and which part of the machine they point to."""

from __future__ import annotations

import math
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, rounded
from rlwatch.detectors.nan_chain import CLASSES, Chain, ChainWatch, broken
from rlwatch.detectors.origin import suspect
from rlwatch.records import JSON, ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold

OPTIONAL = (
    "policy/kl_ref",
    "policy/kl_old",
    "ratio/mean",
    "ratio/max",
    "mismatch/kl",
    "mismatch/k3",
    "mismatch/logp_absdiff",
    "mismatch/prob_absdiff",
)
"""Metrics some trainers log as NaN when the quantity is switched off (TRL's ``kl`` at beta = 0)."""
CORE = (
    "loss/policy",
    "loss/raw",
    "optim/grad_norm",
    "policy/entropy",
    "policy/logp_mean",
    "reward/mean",
    "adv/mean",
    "adv/max",
    *OPTIONAL,
)
COUNTS = "nonfinite/"
PERSISTENT = 3
"""Rows in a row from which one metric alone is critical; a gradient norm needs one less."""
RECENT_ROWS = 50


class NonFinite(BaseDetector):
    """Any NaN or Inf in a core metric, or any count of non-finite tensor elements above zero.

    One value alone, once, may be a logging quirk or a skipped step: a warning. Several at one step, the
    same again and again, or counts that return are critical. Judged on arrival too. ``evidence["chain"]`` dates the
    links that broke, ``evidence["class"]`` says where the chain was entered (A to D, "" if unknown).
    """

    name: ClassVar[str] = "nonfinite"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in CORE)
    reads: ClassVar[tuple[str, ...]] = CORE

    def __init__(self) -> None:
        super().__init__()
        self._seen_finite: set[str] = set()
        self._told: set[str] = set()
        self._holds = {name: Hold() for name in CORE}
        self._onset = Hold(forgive=1)
        self._counted_rows_ago: int | None = None
        self._chain = ChainWatch()

    def notice(self, event: Event) -> None:
        """Learn what a localisation traced."""
        self._chain.notice(event)

    def measured(self, step: ClosedStep) -> bool:  # noqa: ARG002  (the base's signature)
        """Every row is: what is not finite is what is looked for."""
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """What holds at this row."""
        bad, counts = self._bad(step), self._counts(step)
        certain = self._certain(bad)
        found = self._assess(step, certain, counts)
        never = [name for name in bad if self._never(name)]
        if not found:
            found = [self._once(step, name) for name in never if name not in self._told]
        self._told.update(never)
        self._follow(step, certain, counts)
        self._remember(step, set(bad), counted=bool(counts))
        return found

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Judge a record before its step closes; remembers nothing."""
        return self._assess(step, self._certain(self._bad(step)), self._counts(step))

    @staticmethod
    def _bad(step: ClosedStep) -> list[str]:
        return [name for name in CORE if name in step.metrics and not math.isfinite(step.metrics[name])]

    @staticmethod
    def _counts(step: ClosedStep) -> dict[str, float]:
        """Counts above zero."""
        return {k: v for k, v in step.metrics.items() if k.startswith(COUNTS) and not v <= 0.0}

    def _never(self, name: str) -> bool:
        """Whether it looks switched off: optional, and never measured finite."""
        return name in OPTIONAL and name not in self._seen_finite

    def _certain(self, bad: list[str]) -> list[str]:
        """Those of them that are not merely switched off."""
        certain = [name for name in bad if not self._never(name)]
        return bad if len(certain) >= 2 else certain

    def _assess(self, step: ClosedStep, certain: list[str], counts: dict[str, float]) -> list[Finding]:
        if not certain and not counts:
            return []
        critical = self._is_critical(step, certain, counts)
        return [self._finding(step, certain, counts, Severity.CRITICAL if critical else Severity.WARNING)]

    def _follow(self, step: ClosedStep, certain: list[str], counts: dict[str, float]) -> None:
        links = broken(step, set(certain)) if certain or counts else []
        self._chain.remember(step, links, suspect(step, certain, counts)[0] if links else "")

    def _is_critical(self, step: ClosedStep, bad: list[str], counts: dict[str, float]) -> bool:
        if len(bad) + len(counts) + self._hidden(step, bad) >= 2:
            return True
        if counts:
            return self._counted_rows_ago is not None
        need = PERSISTENT - 1 if bad == ["optim/grad_norm"] else PERSISTENT
        return any(self._lasting(name, step) + 1 >= need for name in bad)

    def _lasting(self, name: str, step: ClosedStep) -> int:
        """Rows before this one over which ``name`` has been non-finite."""
        hold = self._holds[name]
        return hold.rows if hold.since is not None and hold.since < step.step else 0

    def _hidden(self, step: ClosedStep, bad: list[str]) -> int:
        """A sign trainers hide: the gradient is NaN, the loss reads exactly 0 and entropy has vanished."""
        if "optim/grad_norm" not in bad or "policy/entropy" not in self._seen_finite:
            return 0
        return int("policy/entropy" not in step.metrics and step.metrics.get("loss/policy") == 0.0)

    def _remember(self, step: ClosedStep, bad: set[str], *, counted: bool) -> None:
        for name in CORE:
            if name in step.metrics:
                self._holds[name].update(step.step, name in bad)
                if name not in bad:
                    self._seen_finite.add(name)
        if counted:
            self._counted_rows_ago = 0
        elif self._counted_rows_ago is not None:
            self._counted_rows_ago += 1
            if self._counted_rows_ago > RECENT_ROWS:
                self._counted_rows_ago = None

    def _once(self, step: ClosedStep, name: str) -> Finding:
        return self.finding(
            step,
            "nonfinite",
            Severity.INFO,
            f"{name} has never been finite in this run: most likely the trainer does not compute it",
            metric=name,
            evidence={"metrics": [name]},
        )

    def _finding(self, step: ClosedStep, bad: list[str], counts: dict[str, float], severity: Severity) -> Finding:
        names = [*bad, *counts]
        starts = [hold.since for name in bad if (hold := self._holds[name]).since is not None]
        origin, says = suspect(step, bad, counts)
        shown = ", ".join(f"{name} = {step.metrics[name]}" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        chain = self._chain.with_row(step, broken(step, set(bad)), origin)
        kind = self._chain.kind(chain)
        return self.finding(
            step,
            "nonfinite",
            severity,
            f"non-finite values: {shown}{more}; {says}{_entered(chain, kind)}",
            onset=min((s for s in starts if s is not None), default=None),
            metric=names[0],
            score=float(len(names)),
            evidence={"metrics": names, "suspect": origin, "counts": rounded(counts), **self._evidence(chain, kind)},
        )

    def _evidence(self, chain: Chain, kind: str) -> dict[str, JSON]:
        traced = self._chain.traced(chain)
        return {"class": kind, "chain": dict(chain.onsets), **({"trace": traced} if traced else {})}


def _entered(chain: Chain, kind: str) -> str:
    """Where the chain was entered and how it went on, if more than this row says so."""
    where = f"; class {kind} ({CLASSES[kind]})" if kind else ""
    return where + (f"; in order: {chain.said()}" if len(set(chain.onsets.values())) > 1 else "")
