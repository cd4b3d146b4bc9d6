"""Findings as signs: one for each time a failure began, on the branch of attempts that counts."""

import pytest
from found import CRITICAL, INFO, WARNING, found, happened
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.diagnosis.signs import MOST, Sign, on_branch, row_steps, signs, starts_of
from rlwatch.records import Severity

SEVERITIES = st.sampled_from([INFO, WARNING, CRITICAL])
FINDINGS = st.lists(
    st.builds(
        lambda kind, onset, severity, delay: found(kind, onset, severity, delay=delay),
        st.sampled_from(["kl_drift", "entropy_collapse"]),
        st.integers(0, 30),
        SEVERITIES,
        st.integers(0, 15),
    ),
    max_size=12,
)


@given(FINDINGS, st.randoms(use_true_random=False))
def test_the_order_of_the_findings_does_not_matter(findings, rng):
    """Files and stores list them as they like."""
    shuffled = list(findings)
    rng.shuffle(shuffled)

    assert signs(shuffled) == signs(findings)


@given(FINDINGS)
def test_every_finding_is_part_of_a_sign_of_its_kind(findings):
    """One that is at least as severe and lasts from its onset until it was told; signs come in order of onset."""
    told = signs(findings)

    for finding in findings:
        assert any(
            sign.kind == finding.kind
            and sign.onset_step <= finding.onset_step
            and finding.step <= sign.last_seen_step
            and sign.severity.rank >= finding.severity.rank
            for sign in told
        )
    assert [sign.onset_step for sign in told] == sorted(sign.onset_step for sign in told)


def test_findings_of_one_beginning_are_one_sign_in_its_severest_words():
    """Told until the last of them; the words are those of the worst, the first to say so."""
    (sign,) = signs(
        [
            found("kl_drift", 10, INFO, delay=2, message="rises"),
            found("kl_drift", 10, CRITICAL, delay=5, message="out of bounds", metric="policy/kl"),
            found("kl_drift", 9, WARNING, delay=9, message="still"),
        ]
    )

    assert sign == Sign("kl_drift", 9, 12, Severity.CRITICAL, "out of bounds", "policy/kl", last_seen_step=18)
    assert sign.bad


def test_a_failure_that_begins_again_is_a_sign_of_its_own():
    """Its onset lies after the first was seen."""
    first, again = signs([found("kl_drift", 10, delay=3), found("kl_drift", 14, delay=3)])

    assert (first.onset_step, first.seen_step, again.onset_step, again.seen_step) == (10, 13, 14, 17)


def test_only_the_newest_signs_are_considered():
    """A run with more has other troubles than their order."""
    told = signs(found("kl_drift", 10 * n, delay=1) for n in range(MOST + 5))

    assert len(told) == MOST
    assert (told[0].onset_step, told[-1].onset_step) == (50, 10 * (MOST + 4))


def test_a_kind_the_catalogue_does_not_know_speaks_for_itself():
    """In the words of its name, leading to nothing."""
    (sign,) = signs([found("gpu_on_fire", 3, WARNING)])

    assert sign.entry.title == "Gpu on fire"
    assert sign.entry.leads_to == ()
    assert not sign.leads_to(sign, slack=100)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 20)), max_size=12),
    st.dictionaries(st.integers(1, 4), st.integers(0, 20)),
)
def test_steps_run_again_count_in_the_newest_attempt_only(parts, starts):
    """Of an attempt those before the first step of every later one."""
    findings = [found("kl_drift", step, delay=0, attempt=attempt) for attempt, step in parts]
    expected = [(a, s) for a, s in parts if s < min((starts[b] for b in starts if b > a), default=10**9)]

    assert [(f.attempt, f.step) for f in on_branch(findings, starts)] == expected


def test_an_attempt_starts_with_the_first_that_is_known_of_it():
    """Found or happened; an event without a step says nothing of when."""
    findings = [found("kl_drift", 10, delay=2), found("kl_drift", 30, delay=2, attempt=2)]
    events = [happened("resume", 25), happened("exception", None), happened("resume", 4)]

    assert starts_of(findings, events) == {1: 4, 2: 32}
    assert starts_of([], []) == {}


@pytest.mark.parametrize(
    ("steps", "apart"),
    [
        ([], 1),
        ([7], 1),
        ([5, 5, 5], 1),
        ([9, 3, 1], 1),
        ([10, 20, 20, 30, 5, 15], 10),
        ([1, 2, 3, 50], 1),
        ([0, 4, 8], 4),
    ],
)
def test_rows_are_as_far_apart_as_most_of_them(steps, apart):
    """Steps that repeat or go back (a resume) are no distance."""
    assert row_steps(steps) == apart
