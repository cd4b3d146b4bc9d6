"""Failure signatures that others publish, each as a run made here; ``python tests/detectors/signature_runs.py`` writes
what is said of them into ``docs/signatures.md``, with the root of a clone on PYTHONPATH.
"""

import math
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rlwatch.catalogue import entry
from rlwatch.monitor.engine import Monitor
from rlwatch.monitor.forecasting import NoForecasts
from rlwatch.monitor.step_judge import joined
from rlwatch.records import AlertState, StepRecord
from rlwatch.testing.healthy_runs import healthy_run

PAGE = Path(__file__).parents[2] / "docs" / "signatures.md"
BLOCK = re.compile(r"(<!-- signatures -->\n).*?(<!-- end -->)", re.DOTALL)
LENGTH, ONSET = 400, 200
Curve = Callable[[int, random.Random], float | None]


def ramp(before: float, after: float, over: int = 50, jitter: float = 0.05) -> Curve:
    """``before`` until the onset, ``after`` once ``over`` steps have passed; geometric between, with noise."""

    def curve(step: int, noise: random.Random) -> float:
        share = min(max((step - ONSET) / max(over, 1), 0.0), 1.0)
        return before * (after / before) ** share * math.exp(noise.gauss(0.0, jitter))

    return curve


def line(before: float, after: float, over: int = 200, sigma: float = 0.02, low: float = 0.0) -> Curve:
    """The same in a straight line with additive noise, never below ``low``."""

    def curve(step: int, noise: random.Random) -> float:
        share = min(max((step - ONSET) / over, 0.0), 1.0)
        return max(before + (after - before) * share + noise.gauss(0.0, sigma), low)

    return curve


def flat(level: float, sigma: float = 0.02) -> Curve:
    """A level with noise."""
    return line(level, level, sigma=sigma, low=-math.inf)


def spikes(level: float, times: float, each: int) -> Curve:
    """A gradient norm that is ``times`` as large at about every ``each``-th step from the onset on."""
    return lambda step, noise: (
        level * math.exp(noise.gauss(0.0, 0.2)) * (times if step >= ONSET and noise.random() < 1.0 / each else 1.0)
    )


def now_and_then(curve: Curve, each: int = 10) -> Curve:
    """A score that is measured every so many steps."""
    return lambda step, noise: curve(step, noise) if step % each == 0 else None


def rising(start: float, end: float, sigma: float = 0.03) -> Curve:
    """A reward that rises all the way."""
    return lambda step, noise: start + (end - start) * step / LENGTH + noise.gauss(0.0, sigma)


def saturating(step: int, noise: random.Random) -> float:
    """A reward as rl-doctor's collapses have: up early, and flat from then on."""
    return 0.2 + 0.3 * (1.0 - math.exp(-step / 40.0)) + noise.gauss(0.0, 0.03)


def missing(step: int, noise: random.Random) -> None:
    """A metric that is not logged."""


UNSPLIT: Mapping[str, Curve] = {
    "reward/zero_std_right_frac": missing, "reward/zero_std_wrong_frac": missing, "reward/effective_groups": missing,
}  # fmt: skip
"""What TRL does not log of groups."""
OF_THE_REWARD = (
    "critic/returns_mean",
    "critic/value_mean",
    "reward/pass_at_1",
    "reward/pass_at_8",
    "reward/part/answer",
)
"""Metrics of a healthy run that would contradict another reward."""


@dataclass(frozen=True)
class Signature:
    """``kind``: of the finding that should be made of it, "" where none is; ``worst``: of its alerts; ``run``: the run in words."""

    source: str
    name: str
    kind: str
    worst: str
    run: str
    curves: Mapping[str, Curve] = field(default_factory=dict)


PROBE, DOCTOR, SEED = "rlprobe 0.1.0", "rl-doctor 0.2.0", "papers and issues"
SIGNATURES = (
    Signature(PROBE, "KL blow-up", "kl_drift", "warning", "KL to the reference x 55 in 200 steps, reward flat",
        {"policy/kl_ref": ramp(0.06, 3.3, 200), "reward/mean": saturating}),
    Signature(PROBE, "entropy collapse", "entropy_collapse", "warning", "entropy x 0.007 in 200 steps, reward flat above its start",
        {"policy/entropy": ramp(1.6, 0.011, 200), "reward/mean": saturating}),
    Signature(PROBE, "length hacking", "reward_hacking", "warning", "length x 3.5 and the reward with it",
        {"len/mean": line(200.0, 700.0, sigma=12.0), "reward/mean": line(0.35, 0.7)}),
    Signature(PROBE, "clip saturation", "clip_saturation", "warning", "clip fraction 0.1, then 0.42",
        {"ratio/clipfrac": ramp(0.1, 0.42, 1)}),
    Signature(PROBE, "degenerate groups", "zero_variance", "warning", "groups that agree 0.05 to 0.62",
        {"reward/zero_std_frac": line(0.05, 0.62, over=100), "reward/std": flat(0.35), "adv/std": line(1.0, 0.4), "reward/mean": saturating, **UNSPLIT}),
    Signature(PROBE, "advantage collapse", "advantage_collapse", "warning", "spread of advantages 1 to 0.02",
        {"adv/std": ramp(1.0, 0.02, 100)}),
    Signature(PROBE, "value divergence", "value_divergence", "critical", "value loss x 5, explained variance 0.5 to -0.5",
        {"critic/value_loss": ramp(0.24, 1.2, 120, 0.1), "critic/explained_var": line(0.5, -0.5, low=-9.0)}),
    Signature(PROBE, "gradient pathology: spikes", "grad_spike", "warning", "gradient norm x 50 in a tenth of the steps",
        {"optim/grad_norm": spikes(0.8, 50.0, 10)}),
    Signature(PROBE, "gradient pathology: NaN", "nonfinite", "critical", "counts of NaN gradients in a thirtieth of the steps",
        {"nonfinite/grad": lambda step, noise: float(step >= ONSET and noise.random() < 1.0 / 30.0)}),
    Signature(PROBE, "truncation", "length_explosion", "warning", "cut responses 0.02 to 0.65 while the reward rises",
        {"len/clipped": line(0.02, 0.65, over=100)}),
    Signature(PROBE, "repetition spiral", "repetition", "warning", "repeated n-grams 0.02 to 0.5",
        {"text/repetition": line(0.02, 0.5, sigma=0.01)}),
    Signature(PROBE, "death of the reward's spread", "zero_variance", "warning", "groups that agree 0.05 to 0.9, spread 0.3 to 0.01",
        {"reward/zero_std_frac": line(0.05, 0.9, over=100), "reward/group_std": ramp(0.3, 0.01, 100), "reward/std": flat(0.3), "reward/mean": saturating, **UNSPLIT}),
    Signature(PROBE, "throughput rot", "throughput_drop", "warning", "a step takes 2.5 times as long, responses are 1.8 times as long",
        {"time/step": line(2.0, 5.0, sigma=0.05), "time/throughput": line(5000.0, 2000.0, sigma=50.0)}),
    Signature(PROBE, "format gaming", "format_gaming", "warning", "format 0.2 to 0.97 in 60 steps, the answers stand at 0.44",
        {"reward/part/format": line(0.2, 0.97, over=60, sigma=0.01), "reward/part/answer": flat(0.44), "reward/mean": line(0.32, 0.72, over=60)}),
    Signature(PROBE, "drift of single positions", "", "", "KL on the first tokens of a response: no trainer logs it by position"),
    Signature(DOCTOR, "saturated groups", "zero_variance", "warning", "nearly solved: 0.75 of the groups agree",
        {"reward/mean": rising(0.3, 0.97), "reward/std": flat(0.2), "reward/zero_std_frac": line(0.1, 0.75, over=80), **UNSPLIT}),
    Signature(DOCTOR, "too hard", "never_learns", "warning", "reward 0.035 from the first step on, three quarters of the groups agree",
        {"reward/mean": lambda step, noise: max(noise.gauss(0.035, 0.01), 0.0), "reward/std": flat(0.18), "reward/zero_std_frac": flat(0.75)}),
    Signature(DOCTOR, "reward hacking", "reward_hacking", "warning", "reward 0.2 to 0.9, held-out score 0.4 to 0.2",
        {"reward/mean": rising(0.2, 0.9), "val/score": now_and_then(line(0.42, 0.2, over=120, sigma=0.01))}),
    Signature(DOCTOR, "length hacking", "reward_hacking", "warning", "length x 3.6, reward 0.3 to 0.88, held-out score flat",
        {"len/mean": line(380.0, 1370.0, sigma=12.0), "reward/mean": line(0.3, 0.88), "val/score": now_and_then(flat(0.22, 0.01))}),
    Signature(DOCTOR, "truncation", "length_explosion", "warning", "cut responses 0.005 to 0.42, length x 4",
        {"len/clipped": line(0.005, 0.42, over=100, sigma=0.004), "len/mean": line(380.0, 1880.0, sigma=12.0)}),
    Signature(DOCTOR, "KL blow-up", "kl_drift", "warning", "KL to the reference to 4.5 nats a token, slowly, reward up",
        {"policy/kl_ref": lambda step, noise: 0.02 + 4.5 * (step / LENGTH) ** 2.4 + abs(noise.gauss(0.0, 0.004)), "reward/mean": saturating}),
    Signature(DOCTOR, "clip saturation", "clip_saturation", "warning", "lower clip fraction 0.05 to 0.5",
        {"ratio/clipfrac_low": line(0.05, 0.5, sigma=0.004)}),
    Signature(DOCTOR, "entropy collapse", "entropy_collapse", "warning", "entropy 0.8 to 0.01 over the whole run, reward up early",
        {"policy/entropy": lambda step, noise: 0.8 * math.exp(-6.5 * step / LENGTH + noise.gauss(0.0, 0.05)) + 0.006, "reward/mean": saturating}),
    Signature(DOCTOR, "gradient spikes", "grad_spike", "warning", "gradient norm x 60 at every 25th step",
        {"optim/grad_norm": spikes(0.5, 60.0, 25)}),
    Signature(DOCTOR, "plateau", "plateau", "info", "reward 0.18 to 0.55 in the first 100 steps, and flat from then on",
        {"reward/mean": lambda step, noise: 0.18 + 0.37 / (1.0 + math.exp(-(step - 48) / 16.0)) + noise.gauss(0.0, 0.018)}),
    Signature(DOCTOR, "format domination", "format_domination", "warning", "format 0.35 to 0.98 in 50 steps, the answers earn 0.01 to 0.03",
        {"reward/part/format": lambda step, noise: min(0.35 + 0.63 / (1.0 + math.exp(-(step - 24) / 10.0)) + noise.gauss(0.0, 0.06), 1.0),
         "reward/part/answer": lambda step, noise: max(0.01 + 0.02 * step / LENGTH + noise.gauss(0.0, 0.01), 0.0), "reward/mean": rising(0.1, 0.13, 0.01)}),
    Signature(SEED, "entropy explosion", "entropy_explosion", "critical", "entropy x 10, reward 0.7 to 0.1",
        {"policy/entropy": ramp(0.2, 2.0), "reward/mean": line(0.7, 0.1, over=50)}),
    Signature(SEED, "collapse from the first step", "entropy_collapse", "critical", "entropy 1.2, in the next steps 0.01; reward 0.3 to 0.02",
        {"policy/entropy": lambda step, noise: 1.2 if step <= 1 else 0.01, "reward/mean": lambda step, noise: 0.3 if step <= 1 else 0.02 + 0.01 * noise.random()}),
    Signature(SEED, "reward collapse", "reward_drop", "critical", "reward 0.7 to 0.05, nothing else moves",
        {"reward/mean": line(0.7, 0.05, over=20, sigma=0.03)}),
    Signature(SEED, "importance weights grow heavy tails", "weight_tail", "warning", "effective sample size 0.99 to 0.2",
        {"ratio/ess": ramp(0.99, 0.2, 50, 0.0)}),
    Signature(SEED, "sequence ratios drift with length", "ratio_drift", "warning", "geometric mean ratio 1 to 0.8",
        {"ratio/geo_mean": ramp(1.0, 0.8, 50, 0.001)}),
    Signature(SEED, "trainer-engine mismatch compounds", "mismatch_growth", "critical", "k3 5e-4 to 0.3 in 100 steps, reward falls",
        {"mismatch/k3": ramp(5e-4, 0.3, 100, 0.2), "reward/mean": line(0.7, 0.2, over=100)}),
    Signature(SEED, "IcePop's mask goes blind", "mismatch_mask", "warning", "gap x 10 while the masked share falls to a tenth",
        {"mismatch/k3": ramp(5e-4, 5e-3, 100, 0.2), "mismatch/logp_absdiff": ramp(3e-3, 3e-2, 100), "mismatch/icepop_masked": ramp(1.5e-3, 1.5e-4, 100, 0.1)}),
    Signature(SEED, "k3 saturates", "k3_saturation", "warning", "share of tokens at the clamp 1e-5 to 0.05",
        {"policy/kl_ref_saturated": ramp(1e-5, 0.05, 60)}),
    Signature(SEED, "stale rollouts", "staleness", "warning", "mean age 1 to 8 versions, stale share 0.2 to 1",
        {"staleness/mean": ramp(1.0, 8.0), "staleness/stale_frac": line(0.2, 0.98, over=50, sigma=0.01)}),
    Signature(SEED, "off-policy sequences", "off_policy_mask", "warning", "masked responses 0.01 to 0.5",
        {"offpolicy/masked": ramp(0.01, 0.5)}),
    Signature(SEED, "retokenisation drift", "retokenisation_drift", "warning", "responses that keep their ids 0.99 to 0.4",
        {"text/retok_exact": ramp(0.99, 0.4, 50, 0.0)}),
    Signature(SEED, "observations in the loss", "mask_leakage", "warning", "0.3 of the environment's tokens are trained on",
        {"tokens/environment_leak": lambda step, noise: 0.3 * (step >= ONSET)}),
    Signature(SEED, "lazy likelihood displacement", "likelihood_displacement", "warning", "log-likelihood of right answers -0.3 to -1.5, reward up",
        {"lld/logp_positive": lambda step, noise: -0.3 - 1.2 * min(max((step - ONSET) / 120.0, 0.0), 1.0) + noise.gauss(0.0, 0.01),
         "lld/displaced_frac": line(0.2, 0.7, over=120), "reward/mean": rising(0.3, 0.7)}),
    Signature(SEED, "NaN in the loss", "nonfinite", "critical", "loss, gradient and entropy NaN for good",
        dict.fromkeys(("loss/policy", "optim/grad_norm", "policy/entropy"), lambda step, noise: math.nan if step >= ONSET else 0.3)),
    Signature(SEED, "NaN turns into token id 0", "id0_run", "critical", "all responses are runs of id 0, the engine's log-probs NaN",
        {"text/id0_frac": lambda step, noise: float(step >= ONSET), "mismatch/k3": lambda step, noise: math.nan if step >= ONSET else 5e-4}),
    Signature(SEED, "every update is skipped", "silent_freeze", "critical", "each update is skipped from one step on",
        {"optim/step_skipped": lambda step, noise: float(step >= ONSET)}),
    Signature(SEED, "long tail of responses", "long_tail", "warning", "responses carried over 0.1 to 0.7",
        {"partial/frac": line(0.1, 0.7, over=50)}),
    Signature(SEED, "loops", "repetition", "warning", "looping responses 0.005 to 0.5",
        {"text/looping_frac": line(0.005, 0.5, over=50, sigma=0.005)}),
    Signature(SEED, "length collapse", "length_collapse", "critical", "length 450 to 10, reward 0.7 to 0.1",
        {"len/mean": ramp(450.0, 10.0), "reward/mean": line(0.7, 0.1, over=50)}),
    Signature(SEED, "a value function is clipped", "value_clipping", "warning", "clipped values 0.03 to 0.6",
        {"critic/value_clipfrac": line(0.03, 0.6, over=50)}),
    Signature(SEED, "returns leave the reward", "value_drift", "warning", "mean return from 0.6 to -3, reward as before",
        {"critic/returns_mean": line(0.6, -3.0, over=60, low=-9.0), "critic/value_mean": line(0.6, -3.0, over=60, low=-9.0)}),
)  # fmt: skip


def records(signature: Signature, seed: int = 0) -> list[StepRecord]:
    """The run: healthy in all but what the signature is about."""
    noise = random.Random(seed + 1000)
    rows = []
    for row in healthy_run(seed, length=LENGTH, taps=True, layers=4):
        metrics = dict(row.metrics)
        if "reward/mean" in signature.curves:
            metrics = {name: value for name, value in metrics.items() if name not in OF_THE_REWARD}
        for name, curve in signature.curves.items():
            value = curve(row.step, noise)
            metrics.pop(name, None)
            if value is not None:
                metrics[name] = value
        rows.append(StepRecord(row.step, metrics, seq=row.seq))
    return rows


def alarms(rows: list[StepRecord]) -> list[tuple[int, str, str]]:
    """(step, kind, severity) of each alert that fired or grew worse; of what is only told, where it was told first."""
    monitor = Monitor(forecaster=lambda: NoForecasts("not asked here"))
    outcome = joined([*(monitor.observe(row) for row in rows), monitor.close()])
    fired = [(t.alert.step, t.alert.kind, t.alert.severity.value) for t in outcome.transitions
             if t.notify and t.alert.state is AlertState.FIRING]  # fmt: skip
    told = {(f.kind, f.severity.value): f.step for f in reversed(outcome.findings) if f.severity.value == "info"}
    return fired + [(step, kind, severity) for (kind, severity), step in told.items()]


def judged(signature: Signature) -> dict[str, int]:
    """Severity -> the step at which an alert of the signature's kind had it first. Judged once."""
    return _judged(SIGNATURES.index(signature))


@cache
def _judged(number: int) -> dict[str, int]:
    signature, first = SIGNATURES[number], dict[str, int]()
    for step, kind, severity in sorted(alarms(records(signature))):
        if kind == signature.kind:
            first.setdefault(severity, step)
    return first


def table() -> str:
    """The table, as the page has it."""
    head = "| published by | signature | reported as | run made here | said |\n|---|---|---|---|---|\n"
    return head + "".join(map(table_row, SIGNATURES))


def table_row(signature: Signature) -> str:
    """The row of one signature."""
    said, kind = "nothing", "-"
    if signature.kind:
        kind = f"`{signature.kind}` ({entry(signature.kind).family})"
        least = "info" if signature.worst == "info" else "warning"
        said = ", ".join(
            f"{WORDS[severity]} at {step}"
            for severity, step in judged(signature).items()
            if severity in (least, "warning", "critical")
        )
    return f"| {signature.source} | {signature.name} | {kind} | {signature.run} | {said} |\n"


WORDS = {"info": "a remark, no alert", "warning": "warning", "critical": "critical"}


def page(text: str) -> str:
    """The page with its table made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.name}\n")
