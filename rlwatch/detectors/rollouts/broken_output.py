"""Detect output that is no language any more: runs of token id 0, degenerate batches, garbled text."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import ClassVar

from rlwatch.detectors.base import BaseDetector, Stretch, finite, rounded
from rlwatch.detectors.context import RewardWatch, silent_share
from rlwatch.detectors.rise import MOST, Rise, RiseDetector, RiseLimit, odds
from rlwatch.records import ClosedStep, Finding, Severity
from rlwatch.stats import Hold
from rlwatch.wording import number

SOME = 0.01
"""Share of responses that is no accident; healthy runs have none."""
COUNTED = "nonfinite/rollout_logp"
"""Metric that counts log-probs of the rollout engine that are not finite."""
OF_BOTH = ("mismatch/k3", "mismatch/kl", "mismatch/logp_absdiff")
"""Metrics that are finite only if the engine's log-probs are, for runs in which the non-finite ones are not counted."""
SHORTEST_RUN = 2.0
"""Fewest consecutive tokens of id 0 that are a run."""
MANY = 0.5
"""Share of responses from which the weights or the whole engine must be broken, not single slots of it."""


class Id0Run(BaseDetector):
    """Detector of responses that are at least 90 % token id 0 (``!`` in byte-level vocabularies: verl issue 751).

    One row may be a race between weight update and generation (NeMo-RL issue 2180), which the message notes; a second
    one with half of the responses is critical. If the log-probs of the same responses are finite, no NaN caused them:
    the policy prefers that token, or id 0 is another token in this vocabulary.
    """

    name: ClassVar[str] = "id0_run"
    reads: ClassVar[tuple[str, ...]] = ("text/id0_frac",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = (("text/id0_frac",),)

    def __init__(self) -> None:
        super().__init__()
        self._some = Hold(forgive=1)
        self._many = Hold()

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Return a finding if the row ``step`` has responses with a run of token id 0, which are never normal."""
        share, longest = finite(step, *self.reads) or 0.0, finite(step, "text/id0_run")
        if longest is not None and longest < SHORTEST_RUN:
            # Responses of one token, which id 0 ends: older versions counted them.
            share = 0.0
        self._some.update(step.step, share >= SOME)
        self._many.update(step.step, share >= MANY)
        if share < SOME:
            return []
        length = finite(step, "len/mean")
        run = "" if longest is None else f", in runs of up to {number(longest)} tokens"
        sound = _sampled_finite(step)
        return [
            self.finding(
                step,
                "id0_run",
                Severity.CRITICAL if self._many.lasted(2) else Severity.WARNING,
                f"{share:.0%} of the responses are runs of token id 0{run}: {WHY[sound]}",
                onset=self._some.since,
                metric="text/id0_frac",
                score=share / SOME,
                evidence=rounded({"id0": share, "longest_run": longest, "length": length}) | {"finite": sound},
            )
        ]


WHY = {
    None: "the sampler was given NaN, by broken weights or by the engine's own forward pass",
    False: "the engine's log-probs are not finite, so the sampler was given NaN, by broken weights or by its own "
    "forward pass",
    True: "their log-probs are finite, so no NaN made them: the policy itself prefers that token, or it is padding or "
    "the end token here",
}


def _sampled_finite(step: ClosedStep) -> bool | None:
    """Return whether the engine's log-probs were finite; None where the row does not show it."""
    count = step.metrics.get(COUNTED)
    if count is not None:
        return count == 0.0
    known = [step.metrics[name] for name in OF_BOTH if name in step.metrics]
    return all(map(math.isfinite, known)) if known else None


# A degenerate batch: every response equally long, at the limit, and rewarded alike.

ALIKE = 1e-6
"""Spread of lengths, relative to the mean, that counts as zero."""
ALL = 0.999
"""Share of responses cut at the limit, or in groups with equal rewards, that counts as all of them."""

SOON, LATER = 5, 10
"""Rows for which it must last if the reward has fallen, and if it has not: batches of two responses are often equal."""
FIRST = 3
"""Rows at the start that may differ in a run that was always degenerate."""


def _alike(low: float, mean: float, high: float) -> bool:
    """Return whether all lengths of a batch are equal."""
    return max(high - low, abs(mean - high)) <= ALIKE * max(high, 1.0)


class DegenerateBatch(BaseDetector):
    """Detector of degenerate batches: all responses equally long, all cut, all rewarded alike, as from NaN in sampling.

    Agent-R1's log of it: lengths 257/257/257, clip ratio 1, score -1. It needs no text: every trainer logs lengths and
    rewards. Small batches of hard prompts look like it for some rows, so it must last; critical if the reward has
    fallen, too. Batches whose answers are all right are not degenerate.
    """

    name: ClassVar[str] = "degenerate_batch"
    reads: ClassVar[tuple[str, ...]] = ("len/min",)
    requires: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("len/min", "len/mean", "len/max", "len/clipped", *agreement)
        for agreement in (("reward/std",), ("reward/zero_std_frac",), ("adv/min", "adv/max"))
    )
    shares: ClassVar[tuple[str, ...]] = ("_reward",)

    def __init__(self) -> None:
        super().__init__()
        self._reward = RewardWatch()
        self._holds = Hold(forgive=1)
        self._rows = 0
        self._length = 0.0

    def pass_over(self, rows: Stretch) -> bool:
        """Read all ``rows`` at once if each has responses of different lengths; otherwise return False."""
        low, mean, high = (rows.column(f"len/{what}") for what in ("min", "mean", "max"))
        silent = silent_share(rows.rows[0])
        if not (low and mean and high) or "len/clipped" not in rows.metrics or silent is None:
            return False
        each = zip(low, mean, high, strict=True)
        if self._holds.since is not None or any(_alike(*lengths) for lengths in each):
            return False
        changes = [i for i, pair in enumerate(pairwise((self._length, *high))) if pair[0] != pair[1]]
        if changes:
            self._holds.clear()
        self._holds.miss(rows.steps[changes[-1] if changes else 0 :])
        self._rows, self._length = self._rows + len(high), high[-1]
        return True

    def judge(self, step: ClosedStep) -> list[Finding]:
        """Judge lengths and rewards of the row ``step``; return a finding once enough rows in succession were
        degenerate.
        """
        low, mean, high = (finite(step, f"len/{what}") for what in ("min", "mean", "max"))
        clipped, silent = finite(step, "len/clipped"), silent_share(step)
        if low is None or mean is None or high is None or clipped is None or silent is None:
            return []
        self._rows += 1
        same = _alike(low, mean, high)
        if high != self._length:
            # A limit that depends on the prompt: with one prompt a batch, responses are often equal.
            self._holds.clear()
        self._length = high
        reward = finite(step, "reward/mean")
        worthless = silent >= ALL and (reward is None or not self._reward.right(reward, cut=True))
        self._holds.update(step.step, same and clipped >= ALL and worthless)
        fallen = self._reward.fallen()
        if not self._holds.lasted(SOON if fallen else LATER, SOON):
            return []
        return [self._finding(step, high, self._severity(fallen))]

    def _severity(self, fallen: bool) -> Severity:
        """Return a warning for a run that began like this and has not fallen: a limit is too small, nothing broke."""
        if fallen:
            return Severity.CRITICAL
        return Severity.INFO if self._holds.rows >= self._rows - FIRST else Severity.WARNING

    def _finding(self, step: ClosedStep, length: float, severity: Severity) -> Finding:
        return self.finding(
            step,
            "degenerate_batch",
            severity,
            f"all responses are exactly {number(length)} tokens long, all cut at the limit, and all rewarded alike"
            f"{self._reward.in_words()}: there is nothing to learn from, and sampling from NaN looks like this",
            onset=self._holds.since,
            metric="len/min",
            score=float(self._holds.rows),
            evidence=rounded({"length": length, "reward": self._reward.now, "rows": self._holds.rows}),
        )


# Garbled responses: broken characters, mixed scripts, noise that no longer compresses.


def density(zlib_ratio: float) -> float:
    """Return compressed bytes over bytes of a text: 0.3 to 0.5 for prose, 0.7 and more for random characters.

    ``zlib_ratio``: the inverse, bytes over compressed bytes.
    """
    return MOST if zlib_ratio <= 0.0 else min(1.0 / zlib_ratio, MOST)


MUCH = 0.3
"""Share of garbled characters in responses from which hardly any text is left, so that the finding is critical."""
DESCRIPTIONS = {
    "text/garbled": "{level} of the characters of responses are control, private-use, unassigned or replacement ones",
    "text/replacement": "{level} of the characters of responses stand for bytes that decode to nothing",
    "text/script_switches": "responses change between writing systems {level} times in 100 characters",
    "text/zlib_ratio": "responses hardly compress any more (ratio {level}; prose 2 to 3), as random characters do",
}


class GarbledOutput(RiseDetector):
    """Detector of garbled text: broken characters, mixed scripts or noise in sampled responses, compared with the
    start.

    Nearly always the visible consequence of another failure, so it is critical only if hardly any text is left and the
    reward fell. ``repetition`` detects loops, ``id0_run`` runs of token id 0.
    """

    name: ClassVar[str] = "garbled_output"
    follows_reward: ClassVar[bool] = True
    limits: ClassVar[tuple[RiseLimit, ...]] = (
        RiseLimit("text/garbled", 0.01, 5.0, odds),
        RiseLimit("text/replacement", 0.005, 5.0, odds),
        RiseLimit("text/script_switches", 4.0, 4.0),
        RiseLimit("text/zlib_ratio", 1.5, 1.5, density),
    )

    def report(self, step: ClosedStep, rise: Rise) -> Finding:
        """Return the finding at the row ``step``: the fault of the text, critical if hardly any text is left.

        ``rise``: the course of the metric so far.
        """
        metric, level = rise.limit.metric, rise.level or 0.0
        lost = metric in ("text/garbled", "text/replacement") and level >= MUCH and self._reward.fallen()
        shown = f"{level:.1%}" if metric in ("text/garbled", "text/replacement") else number(level)
        return self.finding(
            step,
            "garbled_output",
            Severity.CRITICAL if lost else Severity.WARNING,
            f"{DESCRIPTIONS[metric].format(level=shown)}{self._reward.in_words()}",
            onset=rise.since,
            metric=metric,
            score=rise.score,
            evidence=rounded(rise.evidence() | {"length": finite(step, "len/mean"), "reward": self._reward.now}),
        )
