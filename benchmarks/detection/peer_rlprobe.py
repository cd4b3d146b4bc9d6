"""PyPI's ``rlprobe`` 0.1.0 on rows from stdin: its live guardian, which asks its doctor at every 25th step, as it does
by default. With ``synth``: the pathologies that it makes itself, two of each and ten sound runs, by canonical names.
"""

import json
import logging
import sys
import tempfile

from rlprobe.doctor.engine import diagnose_view
from rlprobe.doctor.runview import RunView
from rlprobe.schemas import RunManifest, StepRecord
from rlprobe.storage import RunReader
from rlprobe.testing.synth import PATHOLOGIES, generate_run

EVERY = 25
NAMES = {
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "reward/min": "reward_min",
    "reward/max": "reward_max",
    "reward/group_std": "group_reward_std_mean",
    "reward/zero_std_frac": "zero_variance_group_frac",
    "policy/kl_ref": "kl_mean",
    "policy/kl_ref_max": "kl_max",
    "policy/entropy": "entropy_mean",
    "policy/logp_mean": "logprob_mean",
    "ratio/mean": "ratio_mean",
    "ratio/clipfrac": "clip_fraction",
    "adv/mean": "adv_mean",
    "adv/std": "adv_std",
    "critic/value_loss": "value_loss",
    "critic/explained_var": "value_explained_variance",
    "critic/value_clipfrac": "value_clip_fraction",
    "loss/policy": "loss",
    "optim/lr": "lr",
    "optim/grad_norm": "grad_norm",
    "nonfinite/grad": "nan_count",
    "len/mean": "completion_len_mean",
    "len/max": "completion_len_max",
    "len/clipped": "truncation_rate",
    "text/eos_missing": "eos_rate",
    "text/repetition": "repetition_rate",
    "time/step": "step_time_s",
}
"""Ours and theirs."""
INVERSE = {"text/eos_missing"}
"""1 less theirs."""
PART, MEAN = "rewards/", "/mean"


def alarms(rows):
    manifest = RunManifest(run_id="run", created_at="", algorithm="grpo")
    records, told, seen = [], [], set()
    for step, row in rows:
        records.append(record(step, row))
        if step == 0 or step % EVERY:
            continue
        for finding in diagnose_view(RunView(manifest, records)):
            key = (finding.signature_id, finding.severity)
            if key not in seen and finding.severity != "info":
                told.append((step, finding.severity == "critical", finding.signature_id))
            seen.add(key)
    return told


def record(step, row):
    """What is NaN it leaves out, as its own callback does."""
    given = {name: value for name, value in row.items() if value == value}
    fields = {NAMES[name]: 1 - value if name in INVERSE else value for name, value in given.items() if name in NAMES}
    if "nan_count" in fields:
        fields["nan_count"] = int(fields["nan_count"])
    parts = {n[len(PART) : -len(MEAN)]: v for n, v in given.items() if n.startswith(PART) and n.endswith(MEAN)}
    return StepRecord(step=step, reward_components=parts, **fields)


def synth():
    """Runs of 500 steps; what is wrong begins at step 250."""
    for seed in (0, 1):
        for pathology in PATHOLOGIES:
            yield f"{pathology} {seed}", 250, made(pathology, seed)
    for seed in range(10):
        yield f"sound {seed}", None, made(None, 100 + seed, algorithm="ppo" if seed < 2 else "grpo")


def made(pathology, seed, **options):
    with tempfile.TemporaryDirectory() as folder:
        generate_run(folder, pathology, seed=seed, sample_every=10**9, **options)
        return [(step.step, row_of(step)) for step in RunReader(folder).steps()]


def row_of(step):
    given = {name: getattr(step, field) for name, field in NAMES.items()}
    row = {n: float(1 - v if n in INVERSE else v) for n, v in given.items() if v is not None}
    return row | {f"{PART}{name}{MEAN}": value for name, value in step.reward_components.items()}


logging.disable(logging.CRITICAL)
if sys.argv[1:] == ["synth"]:
    for name, onset, rows in synth():
        print(json.dumps({"name": name, "onset": onset, "rows": rows}))
else:
    for line in sys.stdin:
        print(json.dumps(alarms(json.loads(line))), flush=True)
