"""Causes: told from symptoms by order and by known chains, as sure as the evidence is, and causal."""

import json
import random

import pytest
from found import CRITICAL, INFO, WARNING, found, happened
from hypothesis import given, settings
from hypothesis import strategies as st

from rlwatch import catalogue
from rlwatch.diagnosis import Confidence, Nature, diagnose, kinds
from rlwatch.diagnosis.suspects import RESET
from rlwatch.records import CRASH_FORECAST, LOCALISED

MISMATCH = [found("mismatch_growth", 412), found("entropy_collapse", 455), found("reward_drop", 498)]


def titles(diagnosis):
    return [cause.title for cause in diagnosis.causes]


def test_the_chain_is_told_in_time_order_with_its_first_link_as_the_cause():
    """Mismatch, then entropy, then reward: published, and the order seen here."""
    (cause,) = diagnose(MISMATCH).causes

    assert cause.title == "Train-inference mismatch"
    assert cause.sure is Confidence.STRONG
    assert cause.symptoms == ("entropy_collapse", "reward_drop")
    assert [evidence.step for evidence in cause.evidence] == [412, 455, 498]
    assert (
        cause.summary == "the trainer-engine mismatch grew from step 412; entropy fell from 455; reward fell from 498"
    )
    assert "43 steps before" in cause.why


def test_a_cause_that_came_after_the_symptom_does_not_explain_it():
    """The reward fell first: the mismatch that grew 200 steps later is something else."""
    diagnosis = diagnose([found("reward_drop", 200), found("mismatch_growth", 400)])

    assert "reward_drop" not in diagnosis.causes[0].symptoms
    assert {cause.kind for cause in diagnosis.causes} == {"reward_drop", "mismatch_growth"}


def test_an_effect_out_of_reach_is_not_explained():
    """A spike of the gradient 500 steps before a collapse had nothing to do with it."""
    near = diagnose([found("grad_spike", 470, WARNING, delay=0), found("entropy_collapse", 500)])
    far = diagnose([found("grad_spike", 10, WARNING, delay=0), found("entropy_collapse", 500)])

    assert near.causes[0].kind == "grad_spike"
    assert far.causes[0].kind == "entropy_collapse"


def test_within_the_slack_the_known_direction_decides_and_the_cause_is_only_plausible():
    """Onsets 3 steps apart cannot be told apart: what is known to cause the other is taken, with less confidence."""
    diagnosis = diagnose([found("reward_drop", 497), found("entropy_collapse", 500)])

    assert diagnosis.causes[0].kind == "entropy_collapse"
    assert diagnosis.causes[0].sure is Confidence.PLAUSIBLE
    assert "order is uncertain" in diagnosis.causes[0].why


def test_what_began_after_its_effect_did_not_cause_it():
    """The reward fell 12 steps before the entropy did: what set that off is not known, and it is said so."""
    diagnosis = diagnose([found("reward_drop", 88), found("mismatch_growth", 100), found("no_signal", 124)])

    assert [(cause.kind, cause.onset_step) for cause in diagnosis.causes] == [
        ("reward_drop", 88),
        ("mismatch_growth", 100),
    ]
    assert "reward_drop" not in diagnosis.causes[1].symptoms
    assert diagnosis.nature is Nature.SYMPTOM


@pytest.mark.parametrize(
    ("kind", "nature", "title"),
    [
        ("entropy_explosion", Nature.SYMPTOM, "Entropy rose; trigger unknown"),
        ("length_explosion", Nature.SYMPTOM, "Responses hit the length limit; trigger unknown"),
        ("mismatch_growth", Nature.CAUSE, "Train-inference mismatch"),
        ("nonfinite", Nature.CAUSE, "Numbers became non-finite"),
    ],
)
def test_a_symptom_is_called_a_symptom(kind, nature, title):
    """How a policy looks is no explanation; a mechanism that can be mended is."""
    diagnosis = diagnose([found(kind, 100), found("reward_drop", 140), found("no_signal", 160)])

    first = diagnosis.causes[0]
    assert (diagnosis.nature, first.nature, first.title) == (nature, nature, title)
    assert (first.knob != "") == (nature is Nature.CAUSE)
    assert (first.sure is Confidence.STRONG) == (nature is Nature.CAUSE)
    assert diagnosis.to_dict()["nature"] == diagnosis.to_dict()["causes"][0]["nature"] == nature.value


def test_what_was_so_from_the_first_row_explains_nothing_that_began_later():
    """Answers at the limit from row 1 on, and a reward that rose and fell; without a first step nobody knows."""
    run = [found("length_explosion", 2), found("reward_drop", 60), found("no_signal", 70)]

    known, unknown = diagnose(run, starts={1: 1}), diagnose(run)

    assert [cause.symptoms for cause in known.causes if cause.kind == "length_explosion"] == [()]
    assert unknown.causes[0].symptoms == ("reward_drop", "no_signal")
    together = diagnose([found("length_explosion", 1), found("no_signal", 2)], starts={1: 1})
    assert together.causes[0].symptoms == ("no_signal",)


def test_what_took_long_to_be_seen_has_slow_effects():
    """A drift over 2600 steps explains what began in its course and soon after, though 2600 is beyond the usual reach."""
    slow = found("mismatch_growth", 16500, delay=2600)
    run = [slow, found("entropy_collapse", 19170), found("reward_drop", 19400)]

    assert [cause.kind for cause in diagnose(run).causes] == ["mismatch_growth"]
    near, far = diagnose(run).causes[0], diagnose([found("mismatch_growth", 16500), *run[1:]]).causes[0]
    assert near.symptoms == ("entropy_collapse", "reward_drop")
    assert "entropy_collapse" not in far.symptoms


def test_a_remark_that_came_first_is_weak():
    """A little evidence, and never more than that."""
    two = diagnose([found("mismatch_level", 400, INFO), *MISMATCH[1:]]).causes[0]
    one = diagnose([found("mismatch_level", 400, INFO), MISMATCH[1]]).causes[0]

    assert (two.kind, two.sure) == ("mismatch_level", Confidence.WEAK)
    assert (one.kind, one.sure) == ("mismatch_level", Confidence.WEAK)
    assert "its own severity is only info" in two.why


def test_a_cause_that_began_together_with_an_effect_does_not_claim_to_be_first():
    """Three steps are no order, though later effects are clear."""
    (cause,) = diagnose(
        [found("mismatch_growth", 412), found("entropy_collapse", 414), found("reward_drop", 498)]
    ).causes

    assert "began at about the same time as entropy collapse" in cause.why


def test_a_remark_is_no_cause_beside_a_failure():
    """Nor where nothing worse was found: then there is nothing to explain."""
    remark = found("clip_uninformative", 2, INFO)

    assert [cause.kind for cause in diagnose([remark, *MISMATCH]).causes] == ["mismatch_growth"]
    assert diagnose([remark]).causes == ()
    assert diagnose([remark]).why_not == "no finding above info severity"


def test_a_coarse_log_separates_onsets_less_finely():
    """With a row every 10 steps, 15 steps are no order."""
    run = [found("mismatch_growth", 400), found("reward_drop", 415)]

    assert diagnose(run).causes[0].sure is Confidence.STRONG
    assert diagnose(run, row_steps=10).causes[0].sure is Confidence.PLAUSIBLE


def test_a_lone_fall_of_the_reward_is_not_explained_away():
    """Nothing came before: say so, say what is not measured, and look outside the policy."""
    diagnosis = diagnose([found("reward_drop", 104)], measured=["reward/mean", "optim/grad_norm"])

    assert not diagnosis.enough
    assert diagnosis.causes[0].sure is Confidence.WEAK
    assert "Not measured: trainer-engine mismatch, entropy" in diagnosis.why_not
    assert diagnosis.summary == diagnosis.why_not
    assert "hold" in [action.id for action in diagnosis.causes[0].actions]


def test_no_findings_no_cause():
    """A healthy run."""
    assert diagnose([]).causes == ()
    assert diagnose([]).summary == "nothing was found"


def test_one_effect_of_a_warning_may_be_chance():
    """One link is less than two."""
    one = diagnose([found("mismatch_growth", 100, WARNING), found("reward_drop", 200)])
    two = diagnose([*MISMATCH[1:], found("mismatch_growth", 412, WARNING)])

    assert one.causes[0].sure is Confidence.PLAUSIBLE
    assert two.causes[0].sure is Confidence.STRONG


def test_rivals_that_began_together_make_each_other_less_sure():
    """A layer and the mismatch at once: both explain the crash."""
    diagnosis = diagnose([*MISMATCH, found("ratio_drift", 412), found("weight_tail", 430)])
    rivals = {cause.kind: cause for cause in diagnosis.causes}

    assert rivals.keys() == {"mismatch_growth"}
    assert "ratio_drift" in rivals["mismatch_growth"].symptoms
    twins = diagnose([found("likelihood_displacement", 400), found("moe_imbalance", 401), *MISMATCH[2:]])
    assert {cause.sure for cause in twins.causes} <= {Confidence.PLAUSIBLE, Confidence.STRONG}
    assert any("same time" in cause.why for cause in twins.causes)


def test_spikes_that_often_passed_say_little():
    """A gradient that spikes every 100 steps and once shortly before the crash."""
    spikes = [found("grad_spike", step, WARNING, delay=0) for step in range(50, 500, 100)]
    diagnosis = diagnose([*spikes, found("entropy_collapse", 480), found("reward_drop", 495)])
    (spike,) = [cause for cause in diagnosis.causes if cause.kind == "grad_spike"]

    assert spike.sure is Confidence.WEAK
    assert "4 earlier findings of this kind had no effect" in spike.why


def test_what_explains_the_worst_comes_first():
    """A remark from long ago is listed behind the crash's cause."""
    diagnosis = diagnose([found("long_tail", 20, WARNING), *MISMATCH])

    assert titles(diagnosis)[0] == "Train-inference mismatch"


def test_kinds_of_one_cause_are_one_cause():
    """Level, growth and mask of the mismatch are one thing."""
    diagnosis = diagnose([found("mismatch_blind", 400, WARNING), found("mismatch_level", 405, WARNING), *MISMATCH])

    assert titles(diagnosis) == ["Train-inference mismatch"]


def test_the_summary_tells_each_cause_once():
    """The evidence tells all of its signs."""
    run = [found("ratio_drift", 400), found("ratio_length_growth", 420), found("reward_drop", 460)]
    (cause,) = diagnose(run).causes

    assert cause.summary == "sequence ratios drifted from 1 from step 400; reward fell from 460"
    assert [evidence.step for evidence in cause.evidence] == [400, 420, 460]


def test_an_unknown_kind_is_told_and_not_explained():
    """Detectors of one's own."""
    diagnosis = diagnose([found("moon_phase", 30)])

    assert diagnosis.causes[0].title == "Moon phase was found; trigger unknown"
    assert diagnosis.causes[0].actions == ()


def test_steps_run_again_count_in_the_newer_attempt_only():
    """The crash of attempt 1 at step 300 was undone by resuming from 250."""
    run = [found("entropy_collapse", 300, attempt=1), found("long_tail", 260, WARNING, attempt=2)]

    assert [cause.kind for cause in diagnose(run).causes] == ["long_tail"]
    assert diagnose(run, starts={1: 1, 2: 350}).causes[0].kind == "entropy_collapse"


def test_a_finding_that_got_worse_is_one_sign():
    """Published twice: when it began and when it became critical."""
    run = [found("entropy_collapse", 100, WARNING), found("entropy_collapse", 101, CRITICAL, delay=7)]
    (cause,) = diagnose(run).causes

    assert [(e.step, e.severity) for e in cause.evidence] == [(100, CRITICAL)]


def test_events_near_the_onset_are_part_of_the_story():
    """A reset, a localised spike and the exception at the end; not the note of a month ago."""
    events = [
        happened("reference_reset", 400),
        happened(LOCALISED, 455, message="token 'x' carries 80 %"),
        happened(LOCALISED, 456, why_not="budget"),
        happened("resume", 10),
        happened("note", 450),
        happened("exception", 505, error="ValueError: nan"),
    ]
    (cause,) = diagnose(MISMATCH, events=events).causes

    told = [evidence.text for evidence in cause.evidence]
    assert told[0] == "the reference was reset at step 400"
    assert told[2] == "token 'x' carries 80 % at step 455"
    assert told[-1].startswith("training ended with ValueError")
    assert len(told) == 6


def test_a_collapse_is_undone_first_whatever_its_cause():
    """Roll back, lower the rate in the cause's own words, then the cause's own remedies."""
    actions = diagnose(MISMATCH).causes[0].actions

    assert [action.id for action in actions[:3]] == ["roll-back", "lower-lr", "repair-sync"]
    assert "0.3" in actions[1].what
    assert len({action.id for action in actions}) == len(actions)


def test_a_plateau_may_be_answered_with_a_reset():
    """Nothing else is wrong."""
    (cause,) = diagnose([found("reset_due", 900, WARNING)]).causes

    assert RESET in [action.id for action in cause.actions]
    assert cause.withheld == ""


@pytest.mark.parametrize("trouble", ["mismatch_growth", "nonfinite", "entropy_collapse", "reward_drop"])
def test_no_reset_is_advised_while_anything_collapses(trouble):
    """It would make the bad policy the anchor; the advice says that it was withheld."""
    diagnosis = diagnose([found("reset_due", 900, WARNING), found("kl_saturation", 905, INFO), found(trouble, 890)])

    assert [a.id for cause in diagnosis.causes for a in cause.actions if a.id in (RESET, "warm-up")] == []
    assert any(cause.withheld.startswith("no reference reset") for cause in diagnosis.causes)


def test_options_are_those_of_the_trainer():
    """What was asked for, and what rlwatch offers."""
    (cause,) = diagnose(MISMATCH, source="verl").causes

    assert {name for action in cause.actions for name in action.options} == {"verl", "rlwatch"}


def test_a_diagnosis_is_plain_data():
    """The JSON form."""
    document = json.loads(json.dumps(diagnose(MISMATCH, at=520).to_dict()))

    assert document["causes"][0]["sure"] == "strong"
    assert document["causes"][0]["evidence"][0]["step"] == 412
    assert document["at_step"] == 520
    assert document["causes"][0]["actions"][0]["strength"] == "measured"


KINDS = st.sampled_from([*kinds(), "of_ones_own"])
FINDINGS = st.lists(
    st.builds(
        found,
        KINDS,
        st.integers(0, 1500),
        st.sampled_from([INFO, WARNING, CRITICAL]),
        delay=st.integers(0, 60),
        attempt=st.integers(1, 2),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(FINDINGS, st.randoms())
def test_the_order_of_the_findings_does_not_matter(findings, rng: random.Random):
    """A store may give them in any order."""
    shuffled = rng.sample(findings, len(findings))

    assert diagnose(findings) == diagnose(shuffled)


@settings(max_examples=60, deadline=None)
@given(FINDINGS, st.integers(0, 1600))
def test_nothing_after_the_step_is_used(findings, at):
    """What is said at step s is what would have been said at step s."""
    until = [finding for finding in findings if finding.step <= at]
    later = [happened("exception", at + 1, error="x")]

    assert diagnose(findings, at=at, events=later) == diagnose(until, at=at)


@settings(max_examples=60, deadline=None)
@given(FINDINGS)
def test_every_finding_has_a_cause_and_no_collapse_a_reset(findings):
    """The worst sign is explained by the first cause, evidence is in time order, and advice is safe."""
    diagnosis = diagnose(findings, starts={})
    found = [finding for finding in findings if finding.kind != CRASH_FORECAST] or findings
    worst = max((finding.severity for finding in found), key=lambda severity: severity.rank, default=INFO)
    assert bool(diagnosis.causes) == (worst is not INFO)
    if not diagnosis.causes:
        return
    first = diagnosis.causes[0]

    assert max(e.severity.rank for e in first.evidence if e.severity) == worst.rank
    for cause in diagnosis.causes:
        assert cause.onset_step <= min(e.step for e in cause.evidence if e.severity)
        named = cause.kind in catalogue.knobs() or catalogue.entry(cause.kind).mechanism
        assert cause.nature is (Nature.CAUSE if named else Nature.SYMPTOM)
        assert [e.step for e in cause.evidence] == sorted(e.step for e in cause.evidence)
        collapses = {"entropy_collapse", "entropy_explosion", "nonfinite", "reward_drop"} & {
            e.kind for e in cause.evidence
        }
        severe = collapses & {f.kind for f in findings if f.severity is not INFO}
        assert not (severe and RESET in {action.id for action in cause.actions})
