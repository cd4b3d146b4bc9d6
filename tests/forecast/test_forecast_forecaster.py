"""The forecaster of a run: what it says, when it says nothing, and why."""

import math
import random

import pytest
from forecast_models import small_model
from forecast_runs import steady

from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecaster
from rlwatch.forecast import model as artefact
from rlwatch.forecast.forecaster import default_forecaster
from rlwatch.forecast.model import LEAF, Head, Tree
from rlwatch.records import ClosedStep, Event


def told(rows, **options):
    """Step -> forecast."""
    one = Forecaster(options.pop("model", None) or small_model(), **options)
    return {step: one.update(ClosedStep(step, row)) for step, row in rows.items()}


def falling(at=70, length=110):
    """Entropy halves every ten steps from ``at`` on."""
    return steady(length, **{"policy/entropy": lambda s: 0.5 ** (max(0, s - at) / 10)})


def test_before_the_baseline_there_is_none_and_it_says_so():
    """No numbers at all, and the reason."""
    found = told(steady(50))
    assert found[39].absent.startswith("no forecast because it needs the first 40 steps")
    assert (found[39].p50, found[39].risk, found[39].alarm, found[39].metrics) == (None, None, False, {})
    assert found[45].absent == ""
    assert set(found[45].metrics) >= {"forecast/p20", "forecast/p50", "forecast/p100", "forecast/risk"}


def test_an_alarm_comes_with_its_reason_and_names_the_metric():
    """The model's own words in the run's own metric names."""
    found = told(falling())
    first = next(step for step, forecast in found.items() if forecast.alarm)
    assert 72 <= first <= 85
    alarm = found[first + 3]
    assert alarm.risk >= 1.0
    assert alarm.limit == "ent_low"
    assert alarm.why[0].metric == "policy/entropy"
    assert sum(reason.share for reason in alarm.why) <= 1.0 + 1e-9
    assert not any(forecast.alarm for forecast in told(steady(110)).values())


def test_one_odd_row_is_no_alarm():
    """The median of three rows is judged."""
    found = told(steady(110, **{"policy/entropy": lambda s: 0.001 if s in (70, 90) else 1.0}))
    assert not any(forecast.alarm for forecast in found.values())


def test_three_rows_are_a_baseline_where_they_are_sixty_steps():
    """A row every 20 steps: the first forecast is of the fifth row, not of the eighth."""
    found = told(steady(200, every=20))

    assert [step for step, forecast in found.items() if not forecast.absent] == list(range(100, 201, 20))


@pytest.mark.parametrize(("every", "latest"), [(5, 215), (10, 220), (20, 240)])
def test_a_coarse_log_waits_ten_steps_not_three_rows(every, latest):
    """The level is of two rows; judged are three of a log of every 5 steps, two of every 10, and of every 20 one."""
    rows = steady(300, every=every, **{"policy/entropy": lambda s: 0.01 if s > 200 else 1.0})

    assert min(step for step, forecast in told(rows).items() if forecast.alarm) <= latest


def test_a_limit_that_is_near_is_an_alarm_of_its_own():
    """KL to the reference, of which this model knows nothing: which limit, and when."""
    rows = steady(140, **{"policy/kl_ref_k3": lambda s: 0.02 * math.exp(0.05 * max(0, s - 50))})
    found = told(rows)
    alarm = next(forecast for forecast in found.values() if forecast.alarm)
    assert alarm.limit == "ref_kl"
    assert [reason.metric for reason in alarm.why] == ["policy/kl_ref_k3"]
    assert 0.0 <= alarm.steps_to <= 30.0


def test_a_log_that_lacks_what_the_model_goes_by_has_no_forecast():
    """It says how much is there and what is wanted."""
    found = told({step: {"len/mean": 40.0} for step in steady(60)})[60]
    assert found.absent == (
        "no forecast because this run logs 0% of what the model goes by; it would need policy/entropy, mismatch/k3"
    )
    assert found.p50 is None
    assert found.risk is None


def test_a_log_with_too_little_for_a_chance_is_watched_by_its_limits():
    """No chance is made up; the way to a limit is an alarm all the same, with when, and the reason is said."""
    poor = steady(140, **{"policy/kl_ref_k3": lambda s: 0.02 * math.exp(0.05 * max(0, s - 50))})
    found = told({step: {name: row[name] for name in ("len/mean", "policy/kl_ref_k3")} for step, row in poor.items()})
    alarm = next(forecast for forecast in found.values() if forecast.alarm)
    assert alarm.limit == "ref_kl"
    assert alarm.risk >= 1.0
    assert 0.0 <= alarm.steps_to <= 30.0
    assert [reason.metric for reason in alarm.why] == ["policy/kl_ref_k3"]
    assert {forecast.p50 for forecast in found.values()} == {None}
    assert alarm.limits_only.startswith("no chance is given because this run logs 0% of what the model goes by")
    assert not alarm.absent


def test_a_run_that_logs_little_is_held_to_half_the_budget():
    """Of what this model goes by, mismatch is a fifth: enough for a chance, which has to be higher to be an alarm."""
    rows = {step: {"mismatch/k3": row["mismatch/k3"], "len/mean": 40.0} for step, row in steady(90).items()}
    usual, strict = told(rows)[90], told(rows, budget="0.5")[90]
    assert usual.p50 == strict.p50
    assert usual.risk == strict.risk == pytest.approx(usual.p50 / 0.9, rel=0.2)


def scattering(rows, share):
    """The same with rewards that scatter from row to row by this share of what they do within one."""
    draw = random.Random(1)
    return {
        step: row | {"reward/mean": 0.5 + share * row["reward/std"] * draw.gauss(0.0, 1.0)}
        for step, row in rows.items()
    }


def test_in_small_batches_a_chance_has_to_be_higher_to_be_an_alarm():
    """This model does not know the reward: the same chance, of up to 1.8 times the odds before it is an alarm."""
    calm, small, tiny = (told(scattering(falling(), share))[90] for share in (0.1, 0.4, 3.0))

    assert calm.p50 == small.p50 == tiny.p50
    assert calm.risk == told(falling())[90].risk > small.risk > tiny.risk
    assert tiny.risk == pytest.approx(calm.risk * (0.8 / (1.8 * 0.8 / (0.2 + 1.8 * 0.8))), rel=1e-6)


def test_a_threshold_of_ones_own_is_followed_in_small_batches_too():
    """The runs that it comes from had them."""
    calm, tiny = (told(scattering(falling(), share), own=0.9)[90] for share in (0.1, 3.0))

    assert calm.risk == tiny.risk


def never():
    """A model of sparse logs that gives every run a chance of next to nothing."""
    dull = Head(-9.0, ())
    return small_model(hazards=(dull, dull, dull))


@pytest.mark.parametrize(("every", "sparse"), [(1, False), (2, False), (5, True), (20, True)])
def test_a_sparse_log_is_forecast_by_the_model_of_such_logs(every, sparse):
    """Steps between rows decide, once the baseline is complete."""
    rows = steady(300, every=every, **{"policy/entropy": lambda s: 0.01 if s > 150 else 1.0})

    chances = [forecast.p50 for forecast in told(rows, model=small_model(sparse=never())).values() if forecast.p50]

    assert (max(chances) < 0.01) is sparse


def test_without_such_a_model_the_one_there_is_forecasts_sparse_logs():
    """As a file has it that was written before, or made of too few runs."""
    rows = steady(300, every=10, **{"policy/entropy": lambda s: 0.01 if s > 150 else 1.0})

    assert any(forecast.alarm for forecast in told(rows, model=small_model()).values())


def test_rewards_that_begin_to_scatter_are_not_on_their_way_to_a_limit():
    """A small batch: all rewards are alike at the start, then each batch has another mean, around the same one."""
    noise = random.Random(0)
    rewards = {s: 0.5 if s < 45 else 0.5 + noise.choice((-0.5, 0.5)) for s in range(400)}
    rows = {s: {"reward/mean": rewards[s], "len/mean": 40.0, "reward/std": 0.2} for s in range(400)}
    assert not any(forecast.alarm for forecast in told(rows).values())


def test_steps_that_broke_are_a_reason_with_the_metric_that_was_no_number():
    """The share of broken steps is nothing a run logs; what was last NaN in it is."""
    shaky = Tree((1, LEAF, LEAF), (0.01, 0.0, 0.0), (0, 0, 0), (1, 0, 0), (2, 0, 0), (0.2, -1.0, 3.0))
    model = small_model(features=("entropy:fallen", "broken"), hazards=(Head(-1.0, (shaky,)),) * 3)
    rows = steady(70, **{"optim/grad_norm": lambda s: math.nan if s == 60 else 1.0})
    found = told(rows, model=model)
    assert found[59].why == ()
    assert [reason.metric for reason in found[65].why] == ["optim/grad_norm"]


@pytest.mark.parametrize("rows", [{}, steady(3), {1: {}, 2: {}, 3: {}}, {step: {} for step in range(200)}])
def test_runs_without_anything_to_go_by_are_no_error(rows):
    """No rows, three rows, rows without metrics."""
    assert all(forecast.absent and not forecast.alarm for forecast in told(rows).values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_breaks_makes_no_wrong_number(value):
    """All chances stay chances."""
    found = told(steady(100, **{"policy/entropy": lambda s: 1.0 if s < 60 else value}))
    for forecast in found.values():
        for name, number in forecast.metrics.items():
            assert math.isfinite(number), name
    assert 0.0 <= found[100].p50 <= 1.0


def test_a_stricter_budget_and_the_runs_own_experience_raise_the_threshold():
    """Both make the same chance a smaller risk; neither lowers one."""
    rows = steady(90, **{"policy/entropy": lambda s: 0.55 if s > 70 else 1.0})
    plain = told(rows, budget="1")[90].risk
    assert told(rows, budget="0.5")[90].risk == pytest.approx(plain * 0.6 / 0.8)
    assert told(rows, own=0.99)[90].risk == pytest.approx(plain * 0.6 / 0.99)
    assert told(rows, own=0.01)[90].risk == plain


def test_a_reset_of_the_reference_is_taken_notice_of():
    """KL that falls to nothing by a reset is no change of the policy."""
    one = Forecaster(small_model())
    for step, row in steady(60).items():
        one.update(ClosedStep(step, row))
    one.notice(Event("reference_reset", 60))
    one.notice(Event("note", 60))
    assert one.update(ClosedStep(61, steady(61)[61])).absent == ""


def test_a_budget_the_model_has_no_threshold_for_is_refused_at_once():
    """Before any step."""
    with pytest.raises(ConfigError, match=r"no threshold for a budget of '3'.*0\.5, 1"):
        Forecaster(small_model(), budget="3")


def test_the_environment_names_another_model_budget_and_threshold(monkeypatch, tmp_path):
    """What is wrong with them is said at once."""
    artefact.write_model(small_model(), tmp_path / "m.json")
    monkeypatch.setenv("RLWATCH_FORECAST_MODEL", str(tmp_path / "m.json"))
    monkeypatch.setenv("RLWATCH_FORECAST_BUDGET", "0.5")
    monkeypatch.setenv("RLWATCH_FORECAST_THRESHOLD", "0.97")
    one, rows = default_forecaster(), steady(61)
    found = [one.update(ClosedStep(step, row)) for step, row in rows.items()][-1]
    assert found.risk == pytest.approx(one.judged / 0.97)
    monkeypatch.setenv("RLWATCH_FORECAST_THRESHOLD", "high")
    with pytest.raises(ConfigError, match="'high'; it must be a chance"):
        default_forecaster()
    monkeypatch.setenv("RLWATCH_FORECAST_MODEL", str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match="gone"):
        default_forecaster()
