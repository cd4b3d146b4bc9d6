"""The guide to TRL names what there is."""

import dataclasses
import re
from pathlib import Path

import pytest
from tiny_trl import GRPOConfig
from trl import GRPOTrainer

from rlwatch.integrations.level import Level
from rlwatch.metrics import BY_NAME, resolve

pytestmark = pytest.mark.torch
GUIDE = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
WORDS = re.findall(r"`([^`\n]+)`", GUIDE)


def test_every_metric_it_names_is_in_the_table():
    """A name with a slash, of a family of ours; the log's own names resolve."""
    named = [word for word in WORDS if re.fullmatch(r"[a-z_]+/[a-z0-9_]+", word)]
    logged = {word for word in named if resolve(word, "trl/grpo") is not None}

    assert len(named) > 15
    assert {word for word in named if word not in BY_NAME and word not in logged} <= {"rewards/chosen"}


def test_every_setting_it_names_is_one_of_trl():
    """The first column of the table of settings."""
    table = GUIDE.split("## What a setting of TRL changes")[1].split("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    settings = {name for row in rows for name in re.findall(r"`([a-z_]+)", row)} - {"data_source", "task", "source"}
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    taken = set(GRPOTrainer.__init__.__code__.co_varnames)

    assert len(settings) > 12
    assert settings - known - taken - {"env_mask"} == set()


def test_every_level_is_explained():
    """In order."""
    places = [GUIDE.index(f'| `"{level}"`') for level in Level]

    assert places == sorted(places)
