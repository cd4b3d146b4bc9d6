"""Rewards of one prompt a step: most rows say little, some a lot, and a few lucky ones in a row are no level to fall from."""

import random

import pytest

from rlwatch.detectors.context import LUCKY, chance_of_low
from rlwatch.detectors.joint import JointEvidence
from rlwatch.detectors.reward.reward_drop import RewardDrop
from rlwatch.records import ClosedStep, Severity

RUNS, ROWS = 60, 200


def lucky_run(seed, every):
    """Sound: one prompt in eight is easy enough to earn anything."""
    noise, rows = random.Random(seed), []
    for row in range(1, ROWS + 1):
        easy = noise.random() < 1 / 8
        reward = noise.gauss(1.7, 0.3) if easy else noise.choice((0.12, 0.12, 0.12, 0.1, 0.3, 0.0))
        rows.append(ClosedStep(row * every, {"reward/mean": reward}, seq=row))
    return rows


@pytest.mark.parametrize("detector", [RewardDrop, JointEvidence])
@pytest.mark.parametrize("every", [5, 10, 20])
def test_a_few_lucky_rows_are_no_level_to_fall_from(detector, every):
    """However far apart they are: of 60 runs of 200 such rows 15 at most, where two thirds and more were a collapse."""
    critical = 0
    for seed in range(RUNS):
        judge = detector()
        found = [finding for row in lucky_run(seed, every) for finding in judge.update(row)]
        critical += any(finding.severity is Severity.CRITICAL for finding in found)

    assert critical <= 15


@pytest.mark.parametrize(
    ("values", "fell"),
    [
        ([1.0] * 10 + [0.0, 0.0], True),
        ([1.0, 0.0] * 5 + [0.0, 0.0], False),
        ([1.0, 0.0] * 5 + [0.0] * 6, True),
        ([0.0] * 50 + [1.0] * 10 + [0.0, 0.0], True),
        ([0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0] + [0.0] * 4, False),
        ([1.0] * 20 + [0.0, 0.0, 0.0, 1.0, 0.0, 0.0], True),
        ([0.0] * 60, True),
    ],
    ids=["held", "half were low", "half, for long", "learnt late", "lucky", "one lucky row after it", "all low by now"],
)
def test_low_rows_are_chance_if_those_since_the_level_was_reached_are_like_them(values, fell):
    """Two low rows after ten high ones are a fall; after as many low as high ones they are nothing."""
    assert (chance_of_low(values, 1.0, 0.0) <= LUCKY) is fell


@pytest.mark.parametrize("every", [5, 10])
def test_a_level_that_was_held_is_one_to_fall_from(every):
    """The same batches, after the policy has learnt what most of them ask: then all of it is lost, and soon told."""
    late = 0
    for seed in range(20):
        judge, noise, told = RewardDrop(), random.Random(seed), None
        for row in range(1, 121):
            reward = max(noise.gauss(1.6, 0.3), 0.0) if row < 60 else noise.choice((0.12, 0.1, 0.0))
            found = judge.update(ClosedStep(row * every, {"reward/mean": reward}, seq=row))
            if told is None and any(finding.severity is Severity.CRITICAL for finding in found):
                told = row
        late += told is None or not 60 <= told <= 66
    assert late <= 1
