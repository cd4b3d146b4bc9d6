"""The launch script of the example, as far as a machine without GPUs goes: verl accepts its configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlwatch.integrations.verl.settings import VerlSettings, plain, wanted

SCRIPT = Path(__file__).parents[2] / "examples" / "verl_grpo" / "launch.sh"


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """What verl's own command line makes of the script's arguments and one more."""
    folder = tmp_path_factory.mktemp("launch")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "STORE": "/shared/runs"}
    command = [str(SCRIPT), "+trainer.rlwatch.completions={rows:2}", "--cfg", "job"]

    out = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)

    return OmegaConf.create(out.stdout[out.stdout.index("actor_rollout_ref:") :])


def test_one_line_of_the_script_switches_rlwatch_on(composed):
    """Beside verl's console."""
    assert list(composed.trainer.logger) == ["console", "rlwatch"]
    assert wanted(composed.trainer.logger)


def test_our_section_reaches_us(composed):
    """verl's configuration takes keys it does not know, given with a plus."""
    settings = VerlSettings.of(plain(composed))

    assert settings.init["store"] == "/shared/runs"
    assert (settings.init["project"], settings.init["name"]) == ("math", "gsm8k-3b")
    assert settings.completions.rows == 2


def test_the_script_trains_what_we_look_into(composed):
    """verl's v1 trainer, with log-probs of the rollout engine and a reference."""
    assert composed.trainer.use_v1
    assert composed.actor_rollout_ref.rollout.calculate_log_probs
    assert composed.actor_rollout_ref.actor.use_kl_loss
