"""Every option the playbook names for verl exists in the verl that is installed."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from playbook_options import mentioned

if find_spec("verl") is None:
    pytest.skip("verl is not installed: its option names are NOT checked here", allow_module_level=True)

VERL = Path(find_spec("verl").origin).parent
CONFIG = VERL / "trainer" / "config"


def paths(table: dict, prefix: str = "") -> set[str]:
    """Dotted paths of all options."""
    found = set()
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        found |= paths(value, path) if isinstance(value, dict) and value else {path}
    return found


OPTIONS = {
    path
    for name in ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")
    for path in paths(yaml.safe_load((CONFIG / name).read_text()))
}
LOSSES = re.findall(r'register_policy_loss\("(\w+)"\)', (VERL / "trainer/ppo/core_algos.py").read_text())
ESTIMATORS = re.findall(r'^    [A-Z_]+ = "(\w+)"$', (VERL / "trainer/ppo/core_algos.py").read_text(), re.MULTILINE)
WORDS = {
    "loss_mode": LOSSES,
    "adv_estimator": ESTIMATORS,
    "rollout_is": ["token", "sequence"],
    "mode": ["R2", "R3"],
}


def test_options_exist():
    """A dotted name in backticks is a path of the FSDP or the Megatron configuration."""
    named = mentioned("verl")

    assert len(named) > 40
    assert [row for row in named if row[1].partition("=")[0] not in OPTIONS] == []


def test_values_exist():
    """Losses, estimators and modes named are ones verl has."""
    for action, quoted in mentioned("verl"):
        path, _, value = quoted.partition("=")
        allowed = WORDS.get(path.rpartition(".")[2])
        assert allowed is None or not value or value in allowed, (action, quoted)


def test_rejection_options_are_ones_verl_computes():
    """Bounds and statistics of rejection sampling are accepted by verl's own code."""
    source = (VERL / "trainer/ppo/rollout_corr_helper.py").read_text()
    named = {
        q.partition("=")[2] for _, q in mentioned("verl") if q.startswith("algorithm.rollout_correction.rollout_rs=")
    }

    assert named == {"seq_mean_k1", "seq_mean_k3"}
    assert all(f'"{name}"' in source for name in named)
