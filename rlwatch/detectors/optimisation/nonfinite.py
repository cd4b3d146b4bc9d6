"""Detect NaN and infinity: where, how many at once, which quantity broke first, and which component is the suspect.

Gradient -> weights -> rollout -> log-probs -> ratios and KL -> loss -> gradient: a NaN spreads around this cycle. It
enters in one of four ways. A: the backward pass. B: the forward pass or the rollout engine. C: data: misaligned or cut
tokens, whose log-ratios are extreme for some steps before. D: a reward or an advantage. If it did not recur when the
step was run again, it is class E: hardware, a kernel or a race.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, members, rounded
from rlwatch.records import JSON, LOCALISED, ClosedStep, Event, Finding, Severity
from rlwatch.stats import Hold, Window

ADVICE = {
    "rollout_engine": "the rollout engine returns them while the trainer's own log-probs are finite: look at "
    "weight sync and the engine's precision",
    "policy_weights": "the policy's log-probs are broken while the reference is fine: the policy weights "
    "themselves are non-finite, go back to the last good checkpoint",
    "reward": "the reward or advantage is the first to break: look at the reward function and the "
    "normalisation of groups without variance",
    "backward": "the forward pass is finite but the gradient is not: an overflow in the loss (ratio or KL "
    "exponent) or in the backward pass",
    "everything": "nearly everything is broken at once: the weights have most likely become NaN at an earlier update",
    "old_pass": "the old policy's log-probs are the first to break while the policy's own are finite: look at the pass "
    "that computes them (the rollout's or old policy's pass), its precision, padding and weights",
    "chance": "everything is finite when the step is recomputed: hardware, a kernel or a race, not the weights",
    "unknown": "too few metrics are logged to locate the origin",
}


def suspect(step: ClosedStep, bad: Sequence[str], counts: Mapping[str, float]) -> tuple[str, str]:
    """Return the suspected origin of non-finite values in the row ``step`` (a key of ``ADVICE``), and advice to the
    user.

    ``bad``: names of the non-finite metrics. ``counts``: counts of non-finite elements above zero, by metric.
    """
    origin = _origin(step, set(bad), counts)
    return origin, ADVICE[origin]


def _origin(step: ClosedStep, bad: set[str], counts: Mapping[str, float]) -> str:
    broken = {name for name in ("rollout", "old", "ref") if f"nonfinite/{name}_logp" in counts}
    clean = {name for name in ("rollout", "old", "ref") if step.metrics.get(f"nonfinite/{name}_logp") == 0.0}
    if "rollout" in broken and "old" in clean:
        return "rollout_engine"
    if "old" in broken and "ref" in clean:
        return "policy_weights"
    if "old" in broken and step.metrics.get("nonfinite/logp") == 0.0:
        return "old_pass"
    if bad & {"reward/mean", "adv/mean", "adv/max"} or "nonfinite/advantage" in counts:
        return "reward" if "policy/entropy" not in bad and "nonfinite/logp" not in counts else "everything"
    if len(bad) >= 3:
        return "everything"
    forward = bad & {"policy/entropy", "policy/logp_mean", "loss/policy", "loss/raw"}
    if not forward and ("optim/grad_norm" in bad or "nonfinite/grad" in counts):
        return "backward"
    return "unknown"


# The chain: which link broke first, and which followed.

LINKS: Mapping[str, tuple[str, ...]] = {
    "reward": ("nonfinite/reward", "reward/mean"),
    "advantage": ("nonfinite/advantage", "adv/mean", "adv/max"),
    "rollout log-probs": ("nonfinite/rollout_logp",),
    "mismatch": ("mismatch/kl", "mismatch/k3", "mismatch/logp_absdiff", "mismatch/prob_absdiff"),
    "old log-probs": ("nonfinite/old_logp",),
    "reference log-probs": ("nonfinite/ref_logp",),
    "policy": ("nonfinite/logp", "policy/logp_mean", "policy/entropy"),
    "ratio": ("ratio/mean", "ratio/max", "policy/kl_old"),
    "KL to the reference": ("policy/kl_ref",),
    "loss": ("nonfinite/loss", "loss/policy", "loss/raw", "critic/value_loss"),
    "gradient": ("nonfinite/grad", "optim/grad_norm"),
}
"""Links of the cycle in the order of a step, and the metrics that show them broken: a count above 0, or a non-finite
value.
"""
CLASSES = {
    "A": "backward pass",
    "B": "forward pass or rollout engine",
    "C": "data",
    "D": "reward or advantage",
    "E": "hardware, a kernel or a race",
}
ORIGINS = {
    "backward": "A",
    "weights": "A",
    "policy_weights": "A",
    "forward": "B",
    "old_pass": "B",
    "engine": "B",
    "rollout_engine": "B",
    "data": "C",
    "reward": "D",
    "chance": "E",
}
"""Class of each origin, as this module and the trace of a localisation name origins."""
EXTREME = {
    "mismatch/logp_absdiff_max": 20.0,
    "ratio/log_absmax": 20.0,
    "mismatch/logp_absdiff": 3.0,
}
"""Log-ratios (nats) that no policy update makes; trainers clamp them at 20."""
CLEAN_ROWS = 10
"""Rows without non-finite values that end a chain."""
NEAR = 2
"""Steps that a localised step may differ from the beginning of the chain."""


@dataclass(frozen=True, slots=True)
class NonfiniteChain:
    """The links of the training chain (such as reward, loss, gradient) that became non-finite, each with the step of
    it.

    ``onsets``: link -> step. ``origin``: suspected origin, as of the first of them. ``extreme``: number of rows with
    extreme log-ratios shortly before.
    """

    onsets: Mapping[str, int] = field(default_factory=dict)
    origin: str = ""
    extreme: int = 0

    @property
    def since(self) -> int | None:
        """Step at which the first of the chain's links had non-finite values; None if none had."""
        return min(self.onsets.values(), default=None)

    def in_words(self) -> str:
        """Return the links by step, such as ``"gradient (step 12), policy, loss (step 13)"``."""
        steps: dict[int, list[str]] = {}
        for link, step in self.onsets.items():
            steps.setdefault(step, []).append(link)
        return ", ".join(f"{', '.join(links)} (step {step})" for step, links in sorted(steps.items()))


def broken(step: ClosedStep, bad: set[str]) -> list[str]:
    """Return the links of the training chain (such as reward, ratio, loss, gradient) with non-finite values in the row
    ``step``.

    ``bad``: names of the row's non-finite metrics, without those that are merely switched off.
    """
    return [link for link, names in LINKS.items() if any(name in bad or _counted(step, name) for name in names)]


def _counted(step: ClosedStep, name: str) -> bool:
    return name.startswith("nonfinite/") and name in step.metrics and not step.metrics[name] <= 0.0


class ChainWatch:
    """Record of which links of the training chain (from reward to gradient) broke, that is, had non-finite values, and
    when.
    """

    def __init__(self) -> None:
        self._chain = NonfiniteChain()
        self._clean = 0
        self._extreme = Window(rows=20, steps=20, least=1)
        self._trace: tuple[int, dict[str, JSON]] | None = None

    def notice(self, event: Event) -> None:
        """Store where the last non-finite values came from, if the ``event`` reports that they were traced."""
        traced = event.body.get("trace") if event.kind == LOCALISED else None
        if isinstance(traced, Mapping) and event.step is not None:
            self._trace = (event.step, dict(traced))

    def with_row(self, step: ClosedStep, links: list[str], origin: str) -> NonfiniteChain:
        """Return the chain of broken links as it is with the row ``step`` added, without storing it.

        ``links``: links with non-finite values in this row. ``origin``: suspected origin, used if the chain begins
        here.
        """
        past = self._chain
        onsets = {link: min(at, step.step) for link, at in past.onsets.items()}
        fresh = {link: step.step for link in links if link not in onsets}
        return NonfiniteChain({**onsets, **fresh}, past.origin or origin, past.extreme if onsets else self._extremes)

    def pass_over(self, rows: Stretch) -> None:
        """Store ``rows`` in which all metrics are finite, so that no link of the chain is broken."""
        self._clean += len(rows.steps)
        if self._clean > CLEAN_ROWS:
            self._chain = NonfiniteChain()
        there = [(rows.column(name), most) for name, most in EXTREME.items() if name in rows.metrics]
        seen = [[value >= most for value in values] for values, most in there]
        if seen:
            self._extreme.extend(rows.steps, [float(any(row)) for row in zip(*seen, strict=True)])

    def remember(self, step: ClosedStep, links: list[str], origin: str) -> None:
        """Store which ``links`` have non-finite values in the row ``step``.

        ``origin``: suspected origin, used if the chain begins here.
        """
        if links:
            self._chain, self._clean = self.with_row(step, links, origin), 0
        else:
            self._clean += 1
            if self._clean > CLEAN_ROWS:
                self._chain = NonfiniteChain()
        seen = [
            step.metrics[name] >= most
            for name, most in EXTREME.items()
            if name in step.metrics and math.isfinite(step.metrics[name])
        ]
        if seen:
            self._extreme.update(step.step, float(any(seen)))

    @property
    def _extremes(self) -> int:
        return int(sum(self._extreme.values))

    def traced(self, chain: NonfiniteChain) -> dict[str, JSON]:
        """Return the trace of the step in which the chain began; empty if that step was not localised."""
        since = chain.since
        if self._trace is None or since is None or abs(self._trace[0] - since) > NEAR:
            return {}
        step, body = self._trace
        kept = {name: body[name] for name in ("kind", "name", "layer", "origin") if isinstance(body.get(name), str)}
        return {"step": step, **kept}

    def kind(self, chain: NonfiniteChain) -> str:
        """Return the class of the chain (A, B, C, D or E), or an empty string if the evidence does not decide."""
        traced = ORIGINS.get(str(self.traced(chain).get("origin", "")), "")
        if traced:
            return traced
        suspected = ORIGINS.get(chain.origin, "")
        return "C" if chain.extreme >= 2 and suspected in ("", "A") else suspected


# NaN and infinity: where, how many at once, and which part of the machine they point to.

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
"""Metrics that some trainers log as NaN if the quantity is switched off (TRL's ``kl`` at beta = 0)."""
CORE = (
    "loss/policy",
    "loss/raw",
    "critic/value_loss",
    "optim/grad_norm",
    "policy/entropy",
    "policy/logp_mean",
    "reward/mean",
    "adv/mean",
    "adv/max",
    *OPTIONAL,
)
_CORE = frozenset(CORE)
COUNTS = "nonfinite/"
PERSISTENT = 3
"""Consecutive rows from which one metric alone is critical; a gradient norm needs one less."""
RECENT_ROWS = 50


class NonFinite(BaseDetector):
    """Detector of any NaN or Inf in a core metric, or any count of non-finite tensor elements above zero.

    One value alone, once, may be a logging quirk or a skipped step: a warning. Several in one step, the same metric
    again and again, another one soon after, or counts that return are critical. Also judged when a record arrives.
    ``evidence["chain"]`` dates the quantities that broke; ``evidence["class"]`` is where the chain was entered (A to E,
    "" if unknown).
    """

    name: ClassVar[str] = "nonfinite"
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple((name,) for name in CORE)
    reads: ClassVar[tuple[str, ...]] = CORE

    def __init__(self) -> None:
        super().__init__()
        self._seen_finite: set[str] = set()
        self._reported: set[str] = set()
        self._lasts: dict[str, tuple[int, int, int]] = {}
        """For each metric that was non-finite when last measured: its first step, number of rows, and last step."""
        self._onset = Hold(forgive=1)
        self._counted_rows_ago: int | None = None
        self._broke: dict[str, int] = {}
        """Rows since each metric was last certainly non-finite, for the last ``RECENT_ROWS``."""
        self._chain = ChainWatch()

    def notice(self, event: Event) -> None:
        """Store where the last non-finite values came from, if the ``event`` reports that they were traced."""
        self._chain.notice(event)

    def measured(self, step: ClosedStep) -> bool:  # noqa: ARG002  (the base's signature)
        """Return True for every row: the detector looks for values that are not finite."""
        return True

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows``, which are finite, at once; otherwise return False.

        This requires that they have no counts of non-finite elements, and that nothing was non-finite lately.
        """
        if self._lasts or self._broke or self._counted_rows_ago is not None or members(rows.rows[0], COUNTS):
            return False
        self._seen_finite |= rows.metrics & _CORE
        self._chain.pass_over(rows)
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return findings for the row's non-finite values; a metric that was never finite is reported once, as
        ``info``.
        """
        bad, counts = self._bad(step), self._counts(step)
        certain = self._certain(bad)
        found = self._assess(step, certain, counts)
        never = [name for name in bad if self._never(name)]
        if not found:
            found = [self._once(step, name) for name in never if name not in self._reported]
        self._reported.update(never)
        self._follow(step, certain, counts)
        self._remember(step, set(bad), counted=bool(counts))
        if self._broke or certain:
            self._broke = {name: rows + 1 for name, rows in self._broke.items() if rows < RECENT_ROWS}
            self._broke |= dict.fromkeys(certain, 0)
        return found

    def arrival(self, step: ClosedStep) -> list[Finding]:
        """Return findings for a record before its step closes, without storing it."""
        return self._assess(step, self._certain(self._bad(step)), self._counts(step))

    @staticmethod
    def _bad(step: ClosedStep) -> list[str]:
        if step.numbers is step.metrics:
            return []
        return [name for name in CORE if name in step.metrics and name not in step.numbers]

    @staticmethod
    def _counts(step: ClosedStep) -> dict[str, float]:
        """Return the row's counts of non-finite elements that are above zero, by metric."""
        return {name: step.metrics[name] for name in members(step, COUNTS) if not step.metrics[name] <= 0.0}

    def _never(self, name: str) -> bool:
        """Return whether the metric looks switched off: optional, and never measured finite."""
        return name in OPTIONAL and name not in self._seen_finite

    def _certain(self, bad: list[str]) -> list[str]:
        """Return those of the non-finite metrics ``bad`` that are not merely switched off."""
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
        if self._broke.keys() - set(bad):
            return True
        need = PERSISTENT - 1 if bad == ["optim/grad_norm"] else PERSISTENT
        return any(self._lasting(name, step) + 1 >= need for name in bad)

    def _lasting(self, name: str, step: ClosedStep) -> int:
        """Return the number of rows before this one over which ``name`` has been non-finite."""
        since, rows, _ = self._lasts.get(name, (step.step, 0, 0))
        return rows if since < step.step else 0

    def _hidden(self, step: ClosedStep, bad: list[str]) -> int:
        """Return 1 for hidden NaN: the gradient is NaN, the loss reads exactly 0 and entropy has vanished."""
        if "optim/grad_norm" not in bad or "policy/entropy" not in self._seen_finite:
            return 0
        return int("policy/entropy" not in step.metrics and step.metrics.get("loss/policy") == 0.0)

    def _remember(self, step: ClosedStep, bad: set[str], *, counted: bool) -> None:
        at, lasts = step.step, self._lasts
        self._seen_finite |= step.numbers.keys() & _CORE
        for name in step.numbers.keys() & lasts.keys():
            del lasts[name]
        for name in bad:
            since, rows, last = lasts.get(name, (at, 0, -1))
            lasts[name] = (since, rows + 1, at) if at > last else (at, 1, at)  # a step that comes again begins anew
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
        starts = [self._lasts[name][0] for name in bad if name in self._lasts]
        origin, text = suspect(step, bad, counts)
        shown = ", ".join(f"{name} = {step.metrics[name]}" for name in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        chain = self._chain.with_row(step, broken(step, set(bad)), origin)
        kind = self._chain.kind(chain)
        if kind == "E":
            origin, text = "chance", ADVICE["chance"]
        return self.finding(
            step,
            "nonfinite",
            severity,
            f"non-finite values: {shown}{more}; {text}{_entered(chain, kind)}",
            onset=min((s for s in starts if s is not None), default=None),
            metric=names[0],
            score=float(len(names)),
            evidence={"metrics": names, "suspect": origin, "counts": rounded(counts), **self._evidence(chain, kind)},
        )

    def _evidence(self, chain: NonfiniteChain, kind: str) -> dict[str, JSON]:
        traced = self._chain.traced(chain)
        return {"class": kind, "chain": dict(chain.onsets), **({"trace": traced} if traced else {})}


def _entered(chain: NonfiniteChain, kind: str) -> str:
    """Return where the chain was entered, and its course if it covers more than this row."""
    where = f"; class {kind} ({CLASSES[kind]})" if kind else ""
    return where + (f"; in order: {chain.in_words()}" if len(set(chain.onsets.values())) > 1 else "")
