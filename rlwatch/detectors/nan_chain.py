"""The chain of non-finite values: which link broke first, which followed, and where the chain was entered.

Gradient -> weights -> rollout -> log-probs -> ratios and KL -> loss -> gradient: once a NaN is in, it goes round.
It is entered in one of four ways. A: the backward pass. B: the forward pass or the rollout engine. C: data,
misaligned or cut tokens whose log-ratios are extreme for some steps before. D: a reward or an advantage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlwatch.records import JSON, LOCALISED, ClosedStep, Event
from rlwatch.stats import Window

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
    "loss": ("nonfinite/loss", "loss/policy", "loss/raw"),
    "gradient": ("nonfinite/grad", "optim/grad_norm"),
}
"""Links in the order of a step, and the metrics that show them: a count above 0, or a value that is not finite."""
CLASSES = {
    "A": "backward pass",
    "B": "forward pass or rollout engine",
    "C": "data",
    "D": "reward or advantage",
}
ORIGINS = {
    "backward": "A",
    "weights": "A",
    "policy_weights": "A",
    "forward": "B",
    "engine": "B",
    "rollout_engine": "B",
    "data": "C",
    "reward": "D",
}
"""Class of an origin, as ``rlwatch.detectors.origin`` and a localisation's trace name them."""
EXTREME = {
    "mismatch/logp_absdiff_max": 20.0,
    "ratio/log_absmax": 20.0,
    "mismatch/logp_absdiff": 3.0,
}
"""Log-ratios (nats) no policy update makes; trainers clamp them at 20."""
CLEAN_ROWS = 10
"""Rows without anything non-finite that end a chain."""
NEAR = 2
"""Steps by which a localised step may lie beside the beginning of the chain."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Links with the step each broke at, in order; ``origin`` as suspected at the first of them; ``extreme``: rows
    with extreme log-ratios shortly before.
    """

    onsets: Mapping[str, int] = field(default_factory=dict)
    origin: str = ""
    extreme: int = 0

    @property
    def since(self) -> int | None:
        """Step of the first link."""
        return min(self.onsets.values(), default=None)

    def said(self) -> str:
        """``"gradient (step 12), policy, loss (step 13)"``: links of one step together."""
        steps: dict[int, list[str]] = {}
        for link, step in self.onsets.items():
            steps.setdefault(step, []).append(link)
        return ", ".join(f"{', '.join(links)} (step {step})" for step, links in sorted(steps.items()))


def broken(step: ClosedStep, bad: set[str]) -> list[str]:
    """Links that are broken at this row; ``bad`` are metrics known to be so, and not merely switched off."""
    return [link for link, names in LINKS.items() if any(name in bad or _counted(step, name) for name in names)]


def _counted(step: ClosedStep, name: str) -> bool:
    return name.startswith("nonfinite/") and name in step.metrics and not step.metrics[name] <= 0.0


class ChainWatch:
    """Follows the chain over rows; :meth:`with_row` shows it with a row that has not been remembered."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._clean = 0
        self._extreme = Window(rows=20, steps=20, least=1)
        self._trace: tuple[int, dict[str, JSON]] | None = None

    def notice(self, event: Event) -> None:
        """Keep what the last localisation traced."""
        traced = event.body.get("trace") if event.kind == LOCALISED else None
        if isinstance(traced, Mapping) and event.step is not None:
            self._trace = (event.step, dict(traced))

    def with_row(self, step: ClosedStep, links: list[str], origin: str) -> Chain:
        """The chain including the links broken at this row."""
        past = self._chain
        onsets = {link: min(at, step.step) for link, at in past.onsets.items()}
        fresh = {link: step.step for link in links if link not in onsets}
        return Chain({**onsets, **fresh}, past.origin or origin, past.extreme if onsets else self._extremes)

    def remember(self, step: ClosedStep, links: list[str], origin: str) -> None:
        """Take the row."""
        if links:
            self._chain, self._clean = self.with_row(step, links, origin), 0
        else:
            self._clean += 1
            if self._clean > CLEAN_ROWS:
                self._chain = Chain()
        seen = [
            step.metrics[name] >= most
            for name, most in EXTREME.items()
            if math.isfinite(step.get(name) or 0.0) and name in step.metrics
        ]
        if seen:
            self._extreme.update(step.step, float(any(seen)))

    @property
    def _extremes(self) -> int:
        return int(sum(self._extreme.values))

    def traced(self, chain: Chain) -> dict[str, JSON]:
        """The trace of the step in which the chain began; empty if it was not localised."""
        since = chain.since
        if self._trace is None or since is None or abs(self._trace[0] - since) > NEAR:
            return {}
        step, body = self._trace
        kept = {name: body[name] for name in ("kind", "name", "layer", "origin") if isinstance(body.get(name), str)}
        return {"step": step, **kept}

    def kind(self, chain: Chain) -> str:
        """A, B, C, D, or nothing if the signs do not say."""
        traced = ORIGINS.get(str(self.traced(chain).get("origin", "")), "")
        if traced:
            return traced
        told = ORIGINS.get(chain.origin, "")
        return "C" if chain.extreme >= 2 and told in ("", "A") else told
