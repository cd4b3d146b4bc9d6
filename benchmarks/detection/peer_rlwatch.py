"""PyPI's ``rlwatch`` 0.5.1 (another project of that name) on rows from stdin: its own monitor, its own defaults."""

import contextlib
import io
import json
import logging
import sys
import tempfile

import rlwatch

NAMES = {
    "policy/entropy": "entropy",
    "policy/kl_ref": "kl_divergence",
    "reward/mean": "reward_mean",
    "reward/std": "reward_std",
    "adv/std": "advantage_std",
    "loss/policy": "loss",
    "optim/grad_norm": "grad_norm",
}


def alarms(rows, number):
    with tempfile.TemporaryDirectory() as folder:
        monitor = rlwatch.attach(framework="manual", run_id=f"r{number}", storage={"log_dir": folder})
        told = []
        for step, row in rows:
            given = {NAMES[name]: value for name, value in row.items() if name in NAMES}
            told += [(alert.step, alert.severity == "critical") for alert in monitor.log_step(step, **given)]
        monitor.stop()
    return told


logging.disable(logging.CRITICAL)
for number, line in enumerate(sys.stdin):
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        found = alarms(json.loads(line), number)
    print(json.dumps(found), flush=True)
