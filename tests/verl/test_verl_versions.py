"""What the docs say of each version is what the code asks, of the verl that is installed here."""

from pathlib import Path

import pytest
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from rlwatch.integrations.compat import lacking
from rlwatch.integrations.verl import compat

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
COLUMNS = ("scalars", "ended", "tokens", "gradients", "commands")
LAUNCHER, LOGGER = "the launcher above", '`trainer.logger=\'["console","rlwatch"]\'`'


def table():
    """Version -> the line to add, and what it gives."""
    section = PAGE.read_text().partition("## What each version gives")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    return {row[0]: (row[1], dict(zip(COLUMNS, row[2:7], strict=True))) for row in rows}


def found():
    """The same of the verl that is installed, by what the integration asks of it."""
    trainer = lacking(PPOTrainer, compat.TRAINER) is None
    missing = compat.missing_parts(PPOTrainer)
    updates = bool(POLICY_LOSS_REGISTRY) and lacking(FSDPEngineWithLMHead, {**compat.STEPS, **compat.PASSES}) is None
    gives = {
        "scalars": lacking(Tracking, compat.TRACKING) is None,
        "ended": trainer,
        "tokens": trainer and updates and "the tokens of a step's batch" not in missing,
        "gradients": trainer and updates,
        "commands": trainer and "commands" not in missing,
    }
    line = LOGGER if compat.loads_plugins() else LAUNCHER
    return line, {name: "yes" if there else "no" for name, there in gives.items()}


def test_the_table_says_of_this_version_what_it_has():
    """Line to add and parts."""
    assert table()[verl.__version__] == found()


@pytest.mark.parametrize("version", ["0.5.0", "0.6.1", "0.7.1", "0.8.0"])
def test_versions_before_plugins_are_promised_scalars_and_the_launcher(version):
    """As ``make nightly`` finds them; the test of the launcher runs the same on this one, its plugins switched off."""
    line, gives = table()[version]

    assert line == LAUNCHER
    assert [name for name in COLUMNS if gives[name] == "yes"] == ["scalars", "ended"]
