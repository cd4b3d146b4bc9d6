"""PyPI's ``rldoctor`` 0.2.0 on rows from stdin: its live monitor, checked every 25 rows as it does by default."""

import contextlib
import io
import json
import logging
import sys

from rl_doctor.detectors.base import Severity
from rl_doctor.live import LiveMonitor

NAMES = {
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "loss/policy": "loss",
    "optim/grad_norm": "grad_norm",
    "len/mean": "completion_length",
    "len/clipped": "clipped_ratio",
    "ratio/clipfrac": "clip_fraction",
    "reward/zero_std_frac": "frac_reward_zero_std",
    "optim/lr": "learning_rate",
}


def alarms(rows):
    monitor, told = LiveMonitor(on_finding=lambda _finding: None), []
    for step, row in rows:
        given = {NAMES.get(name, name): value for name, value in row.items()}
        told += [(step, finding.severity >= Severity.CRITICAL) for finding in monitor.log(given, step=step)]
    return told


logging.disable(logging.CRITICAL)
for line in sys.stdin:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        found = alarms(json.loads(line))
    print(json.dumps(found), flush=True)
