"""A localisation in words: verdict, cause and cure."""

import math

import pytest

from rlwatch.gradloc.report import Cure, Localisation, message_of, remedy_of


def cure(after=1.3, action="with advantages clipped at 2"):
    return Cure("clip advantages", 2.0, action, 412.0, after)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (Localisation(1.0), ""),
        (Localisation(1.0, statement="rank 1 makes it"), "rank 1 makes it"),
        (Localisation(1.0, statement="rank 1 makes it", because="it is far off"), "rank 1 makes it: it is far off"),
        (
            Localisation(412.0, statement="one token makes it", because="it is far off", remedy=remedy_of([cure()])),
            "one token makes it: it is far off; with advantages clipped at 2 the norm goes from 412 to 1.3",
        ),
    ],
    ids=["nothing", "a verdict", "and why", "and what helps"],
)
def test_verdict_cause_and_cure_are_one_sentence(report, sentence):
    """What is not known is left out."""
    assert message_of(report) == sentence


def test_the_first_cure_that_is_known_is_told():
    """A norm that is none is no cure."""
    cures = [cure(math.nan), cure(action="with the token masked")]

    assert remedy_of(cures) == "with the token masked the norm goes from 412 to 1.3"
    assert remedy_of([]) == ""
