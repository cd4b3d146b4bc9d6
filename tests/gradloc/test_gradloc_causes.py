"""Which class a culprit is in, from its numbers, its response and what is usual in its step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.gradloc.culprits import ResponseLevels, RobustLevel, StepLevels, cause_of, cause_of_step
from rlwatch.gradloc.report import Culprit, ExcessFactor, TokenAt

ORDINARY = {"logp": -1.0, "old_logp": -1.1, "rollout_logp": -1.05, "ref_logp": -1.2, "advantage": 1.0, "reward": 0.5}
NEAR = ResponseLevels(0.01, -0.02)
STEP = StepLevels.of([1.0, -1.0, 0.5, -0.5, 1.2, -0.8], [0.0, 1.0, 0.5, 0.4, 0.6, 0.2])


def cause(changes=(), response=NEAR, step=STEP):
    return cause_of(ORDINARY | dict(changes), response, step)


def test_what_is_within_its_usual_range_is_unexplained():
    """And it is said that everything was looked at."""
    assert cause()[0] is ExcessFactor.UNEXPLAINED


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_any_number_that_is_not_finite_comes_first(name, value):
    """Whatever else is far out."""
    found, why = cause({"old_logp": -9.0} | {name: value})

    assert (found, why) == (ExcessFactor.NON_FINITE, f"not finite: {name}")


@pytest.mark.parametrize(("name", "who"), [("old_logp", "old policy"), ("rollout_logp", "rollout engine")])
@pytest.mark.parametrize(("apart", "far"), [(1.0, False), (1.2, True), (-1.0, False), (-9.0, False), (9.0, True)])
def test_a_token_is_its_ratio_from_a_factor_of_three_on(name, who, apart, far):
    """log 3 = 1.0986 nats, where dual-clip PPO caps; never a ratio below 1, which made the coefficient smaller."""
    found, why = cause({name: -1.0 - apart})

    assert (found is ExcessFactor.TOKEN_RATIO) is far
    assert (who in why) is far


def test_the_factor_is_said_as_a_number_or_as_a_power():
    """e^9 is 8103; nobody reads that."""
    assert "the token is 3.32 times as likely under the policy" in cause({"old_logp": -2.2})[1]
    assert "the token is e^9 times as likely" in cause({"old_logp": -10.0})[1]


def test_a_response_that_drifted_as_a_whole_is_a_sequence_ratio():
    """Each of its tokens by as much: that of the culprit is nothing special."""
    found, why = cause({"old_logp": -2.2}, ResponseLevels(1.2, None))

    assert found is ExcessFactor.SEQUENCE_RATIO
    assert "per token, 3.32 times as likely" in why


def test_a_token_far_beyond_its_drifting_response_is_a_token_ratio():
    """Whichever is further beyond its limit."""
    assert cause({"old_logp": -9.0}, ResponseLevels(0.25, None))[0] is ExcessFactor.TOKEN_RATIO
    assert cause({}, ResponseLevels(None, 0.25))[0] is ExcessFactor.SEQUENCE_RATIO
    assert cause({}, ResponseLevels(0.19, None))[0] is ExcessFactor.UNEXPLAINED


def test_a_reference_far_away_is_no_cause_where_no_kl_term_is_known():
    """Many losses have none: then nothing weighs by that factor."""
    assert cause({"ref_logp": 4.0})[0] is ExcessFactor.UNEXPLAINED
    assert cause({"ref_logp": -8.0})[0] is ExcessFactor.UNEXPLAINED


@pytest.mark.parametrize("advantage", [60.0, -60.0])
def test_an_advantage_far_out_among_those_of_the_step_is_a_reward_outlier(advantage):
    """By its size: half of all advantages are negative."""
    found, why = cause({"advantage": advantage})

    assert found is ExcessFactor.REWARD_OUTLIER
    assert f"advantage is {advantage:.3g}, where the step's are about 0.9 in size" in why


def test_a_reward_far_out_is_one_too():
    """Where advantages were clipped or are not known."""
    assert cause({"reward": -40.0})[0] is ExcessFactor.REWARD_OUTLIER


def test_with_two_kinds_of_rewards_nothing_is_an_outlier():
    """The spread is 0: a single success among failures is what groups are for."""
    step = StepLevels.of([1.0, 1.0, -1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0])

    assert cause({"reward": 1.0, "advantage": 2.4}, step=step)[0] is ExcessFactor.UNEXPLAINED
    assert cause({"reward": 1.0, "advantage": 2.6}, step=step)[0] is ExcessFactor.REWARD_OUTLIER


def layered(share=0.95, usual=0.11, top=0.033):
    """A step in which layer 1 has ``share`` of the norm."""
    layers = {"model.layers.0": 1 - share, "model.layers.1": share}
    return StepLevels(layers=layers, usual={"model.layers.1": usual, "model.layers.0": 1 - usual}, top_share=top)


def test_a_layer_is_to_blame_where_it_stands_out_and_no_token_does():
    """The measured case: 11 % -> 95 %, top token 3.3 %."""
    found, why = cause(step=layered())

    assert found is ExcessFactor.LAYER
    assert why == "model.layers.1 makes 95% of the squared norm, usually 11%, and no token more than 3.3%"


@pytest.mark.parametrize(
    "step",
    [
        layered(top=0.11),
        layered(share=0.49),
        layered(usual=0.32),
        layered(top=math.nan),
        StepLevels(layers={"a": 1.0}, top_share=0.01),
        StepLevels(usual={"a": 0.1}, top_share=0.01),
        StepLevels(layers={"a": 1.0}, usual={"a": 0.1}),
    ],
    ids=["a token", "less than half", "not thrice", "no number", "usual unknown", "now unknown", "tokens unknown"],
)
def test_a_layer_is_not_to_blame_otherwise(step):
    """Each condition by itself."""
    assert cause(step=step)[0] is ExcessFactor.UNEXPLAINED


def test_a_token_of_its_own_class_stays_in_it_in_a_step_of_a_layer():
    """The token's numbers say more than the step's."""
    assert cause({"old_logp": -9.0}, step=layered())[0] is ExcessFactor.TOKEN_RATIO


def culprit(cause, share=None):
    return Culprit(TokenAt(0, 0, 0, 0), 0, None, cause, "", share=share)


def test_the_step_has_the_class_of_most_of_the_blame():
    """By share, whatever its sign; by place where shares are not known."""
    a, b = ExcessFactor.TOKEN_RATIO, ExcessFactor.REWARD_OUTLIER

    assert cause_of_step([culprit(a, 0.4), culprit(b, -0.3), culprit(b, 0.2)], STEP) is b
    assert cause_of_step([culprit(a), culprit(b), culprit(b)], STEP) is a
    assert cause_of_step([], STEP) is ExcessFactor.UNEXPLAINED


def test_a_layer_comes_before_tokens_that_do_not_explain_the_step_and_nan_before_all():
    """A ratio of a token with 3 % of the norm is no explanation."""
    assert cause_of_step([culprit(ExcessFactor.TOKEN_RATIO, 0.03)], layered()) is ExcessFactor.LAYER
    assert (
        cause_of_step([culprit(ExcessFactor.TOKEN_RATIO, 0.3), culprit(ExcessFactor.NON_FINITE)], layered())
        is ExcessFactor.NON_FINITE
    )


def test_levels_are_robust_and_need_four_numbers():
    """What is not finite does not count."""
    assert RobustLevel.of([1.0, 2.0, 3.0, math.nan]) is None
    assert RobustLevel.of([1.0, 2.0, 3.0, 4.0, 1e9, math.inf]).middle == 3.0
    assert RobustLevel(1.0, 0.0).z(5.0) == 0.0
    assert RobustLevel(1.0, 0.0).z(5.0, least=2.0) == 2.0


numbers = st.dictionaries(st.sampled_from(list(ORDINARY)), st.floats(), max_size=6)


@given(numbers, st.none() | st.floats(-5, 5), st.lists(st.floats(), max_size=6))
def test_every_token_has_a_class_and_a_sentence(numbers, mean, values):
    """Whatever is known of it, and whatever it is."""
    found, why = cause_of(numbers, ResponseLevels(mean, mean), StepLevels.of(values, values))

    assert why
    assert (found is ExcessFactor.NON_FINITE) == any(not math.isfinite(value) for value in numbers.values())
