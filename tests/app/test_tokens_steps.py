"""The list of steps: what was localised, what was not, what is only far out."""

import math

import pytest
from app_world import cells
from rlwatch_app import token_steps
from rlwatch_app.token_steps import (
    LOOKS,
    NOT_LOCALISED,
    LocalisationReport,
    TokenStep,
    chosen,
    completeness,
    entries,
    finding,
    look,
    matching,
)
from token_world import Spiked, far_out

from rlwatch.gradloc.report import ExcessFactor, Localisation, Method
from rlwatch.gradloc.rows import event_body
from rlwatch.records import CULPRITS, NON_FINITE, Event


def listed(*spiked, far=()):
    """The entries of these steps."""
    culprits = [batch for one in spiked for batch in one.batches() if batch.reason == CULPRITS]
    return entries([one.event() for one in spiked], culprits, far)


def said(entry, attempts=1):
    return cells({"cells": token_steps.step_row(entry, None, attempts).cells})


def test_newest_first_with_norm_cause_culprits_and_the_worst():
    """One row tells whether to look closer."""
    first, second = Spiked(10), Spiked(4766, norm=12.3, cause="layer", blamed=1)
    rows = [said(entry) for entry in listed(first, second, far=[far_out(11, 4)])]

    assert rows[0] == ["4\u202f766", "12.3", "1.9", "layer", "1", "85%", "complete to 0.02%", ""]
    assert [row[0] for row in rows] == ["4\u202f766", "11", "10"]
    assert rows[1] == ["11", "", "", "outlier tokens", "", "", "", "4"]


def test_a_step_localised_and_far_out_is_one_entry():
    """Batches of several ranks are counted together."""
    (entry,) = listed(Spiked(5, blamed=3), far=[far_out(5, 2), far_out(5, 3)])

    assert (entry.culprits, entry.far_out, entry.cause) == (3, 5, "token ratio")


def test_a_step_that_could_not_be_localised_says_why():
    """It has no culprits, and that is known."""
    (entry,) = listed(Spiked(5, blamed=0, why_not="the attention is fused"))

    assert (entry.cause, entry.culprits, entry.worst) == (NOT_LOCALISED, 0, None)
    assert said(entry)[6] == "the attention is fused"


def test_culprits_too_old_to_be_read_are_unknown_not_none():
    """The event still says what the worst held."""
    event = Event("gradient_localised", 3, {"cause": "layer", "culprits": [{"share": 0.2}, {"share": 0.4}]})
    (entry,) = entries([event], [], [])

    assert (entry.culprits, entry.worst) == (None, 0.4)
    assert said(entry)[4:6] == ["", "40%"]


def test_tokens_that_were_not_finite_are_distinguished_from_far_out_ones():
    """Also where the step was not localised."""
    (entry,) = entries([], [], [far_out(4, reason=NON_FINITE)])

    assert entry.cause == "non-finite tokens"


def test_every_attempt_has_its_own_entry():
    """A resumed run comes past a step again."""
    both = listed(Spiked(7), Spiked(7, attempt=2))

    assert [(entry.attempt, entry.step) for entry in both] == [(2, 7), (1, 7)]
    assert both[0].key == "2.7"
    assert token_steps.step_row(both[1], both[1], 2).cells[0]["sub"] == "attempt 1"


@pytest.mark.parametrize(
    ("step", "attempt", "found"),
    [
        (None, None, (2, 9)),
        ("9", None, (2, 9)),
        ("9", "1", (1, 9)),
        ("9", "8", (2, 9)),
        ("20", None, (1, 20)),
        ("9" * 30, None, (2, 9)),
        ("<script>", None, (2, 9)),
        ("", None, (2, 9)),
    ],
)
def test_the_address_chooses_a_step(step, attempt, found):
    """Without one, or with nonsense, the newest that was localised."""
    known = listed(Spiked(9), Spiked(9, attempt=2), far=[far_out(20), far_out(30, attempt=2)])
    entry = chosen(known, step, attempt)

    assert (entry.attempt, entry.step) == found


def test_an_unknown_step_and_no_step_at_all():
    """The first is not among the others; of a run without any there is none to choose."""
    assert chosen(listed(Spiked(9)), "4", None) is None
    assert chosen([], None, None) is None
    assert chosen(entries([], [], [far_out(3)]), None, None).step == 3


def test_the_filter_keeps_the_chosen_causes():
    """None chosen: all."""
    known = listed(Spiked(1), Spiked(2, cause="layer"), far=[far_out(3)])

    assert [entry.step for entry in matching(known, ["layer", "outlier tokens"])] == [3, 2]
    assert matching(known, []) == known


@pytest.mark.parametrize(
    ("gap", "complete", "words"),
    [
        (2e-4, True, "complete to 0.02%"),
        (-0.07, False, "incomplete: 7% of the norm is not accounted for"),
        (0.3, False, "incomplete: 30% of the norm too much"),
        (None, False, ""),
        (math.nan, False, ""),
    ],
)
def test_how_complete_an_attribution_is(gap, complete, words):
    """The gap is told, always; without an attribution nothing is claimed."""
    assert completeness(LocalisationReport(gap=gap, complete=complete)) == words


def test_a_report_is_read_as_it_is_written():
    """Every entry of the event but the culprits, which have batches of their own."""
    told = {"statement", "because", "remedy", "cures", "units", "count", "explained", "grew"}
    assert {*LocalisationReport.__dataclass_fields__, "culprits"} - {"worst", "sentences"} | told == set(
        event_body(Localisation(1.0))
    )
    report = LocalisationReport.of(Spiked(1, norm=math.nan).event().body)
    assert math.isnan(report.norm)
    assert (report.tokens, report.method, report.cost["backwards"]) == (16384, "fd", 8)


def test_verdict_cause_and_cure_are_a_sentence_each():
    """A record of an older version has none of them: then the shares are told, as ever."""
    body = {
        **Spiked(1).event().body, "verdict": "batch-wide", "statement": "batch-wide, no culprit",
        "because": "advantages are 12 times their usual scale", "remedy": "with them as usual the norm goes from 8 to 1",
    }  # fmt: skip
    entry = TokenStep(1, 1, report=LocalisationReport.of(body))

    assert finding(entry, [])[0] == (
        "Batch-wide, no culprit. Advantages are 12 times their usual scale. With them as usual the norm goes from 8 to 1."
    )
    assert finding(TokenStep(1, 1, report=LocalisationReport(cause="token ratio")), [])[0] == "No token stands out."


@pytest.mark.parametrize("body", [{}, {"norm": "x", "layers": [], "cost": None, "notes": 3, "tokens": None}])
def test_an_event_of_another_version_is_read_as_far_as_it_goes(body):
    """No traceback, no made-up number."""
    assert LocalisationReport.of(body) == LocalisationReport()


def test_every_cause_and_method_has_a_look_or_words():
    """One shape each, so that colour is never the only difference."""
    assert {cause.value for cause in ExcessFactor} <= set(LOOKS)
    assert {method.value for method in Method} == set(token_steps.METHODS)
    named = [LOOKS[cause.value].shape for cause in ExcessFactor]
    assert len(named) == len(set(named))
    assert look("a cause of tomorrow") == LOOKS["unexplained"]
