"""A localisation in one sentence."""

import pytest

from rlwatch.gradloc.report import Cause, Culprit, Localisation, TokenAt, summary_of


def culprit(share=0.4, sequence=3, position=7, why="it is far off"):
    return Culprit(TokenAt(0, 1, 1, position), sequence, 5, Cause.TOKEN_RATIO, why, share=share)


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (Localisation(1.0), "no token has a gradient"),
        (
            Localisation(1.0, culprits=[culprit()]),
            "one token at position 7 of sequence 3 contributes 40% of the gradient norm: it is far off",
        ),
        (
            Localisation(1.0, culprits=[culprit(-0.25), culprit(0.2), culprit(0.1)]),
            "one token at position 7 of sequence 3 contributes -25% of the gradient norm (2 more stand out): "
            "it is far off",
        ),
        (
            Localisation(1.0, culprits=[culprit(None), culprit(None)]),
            "one token of sequence 3 has the largest gradient (1 more stand out): it is far off",
        ),
        (
            Localisation(1.0, culprits=[culprit(0.02)], cause=Cause.LAYER, layers={"a": 0.1, "b": 0.85, "c": 0.05}),
            "b holds 85% of the squared gradient norm; no single token stands out",
        ),
        (
            Localisation(1.0, culprits=[culprit()], cause=Cause.TOKEN_RATIO, layers={"a": 0.1, "b": 0.9}),
            "one token at position 7 of sequence 3 contributes 40% of the gradient norm: it is far off",
        ),
        (
            Localisation(1.0, culprits=[culprit()], cause=Cause.LAYER),
            "one token at position 7 of sequence 3 contributes 40% of the gradient norm: it is far off",
        ),
    ],
    ids=["nothing", "one", "several", "no direction", "a layer", "layers that explain nothing", "no layers known"],
)
def test_the_worst_is_said_and_how_many_more_there_are(report, sentence):
    """A layer only where it is the cause; a share only where there is a direction."""
    assert summary_of(report) == sentence
