"""The TRL part of the forecasting corpus: real GRPO and RLOO runs, tiny, some of which fail."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def recipes():
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    from forecast import trl_recipes

    return trl_recipes


@pytest.fixture(scope="module")
def jobs(recipes):
    from forecast import trl_jobs

    return trl_jobs


@pytest.fixture(scope="module")
def short(recipes, jobs):
    """A job of a recipe, cut to six steps of few rollouts, its faults moved to step 3."""
    from forecast.trl_setting import Fault

    def job(name, **changes):
        (recipe,) = (recipe for recipe in recipes.RECIPES if recipe.name == name)
        drawn = jobs.draw(recipe, 1, 0)
        faults = tuple(Fault(f.kind, 3, f.strength, 0, None) for f in drawn.setting.faults)
        small = {"steps": 6, "batch": 32, "generations": 8, "num_iterations": 1, "task": "sort", "start": 0}
        small |= {"faults": faults}
        return replace(drawn, setting=replace(drawn.setting, **(small | changes)))

    return job


@pytest.fixture(scope="module")
def starts(recipes, tmp_path_factory):
    """With one start of the task that these tests use, taught for a shorter time than the corpus's own."""
    from forecast.trl_start import start_policy

    folder = tmp_path_factory.mktemp("starts")
    start_policy("sort", 0, folder, enough=0.25)
    return folder


@pytest.fixture(scope="module")
def flipped(short, starts):
    """Columns of a run whose reward changes sign at step 3, whose engine is one of its own, and how it ended."""
    from forecast.trl_runs import train

    return train(short("trl_sign_flip", trainer="grpo", reward="exact", engine="bfloat16", beta=0.0), starts)


def test_long_runs_are_the_same_runs_with_faults_that_take_their_time(recipes, jobs):
    """About twice as long; a fault that grows begins later and grows longer, what lasts a few steps still does."""
    from forecast.recipes import Pace

    drawn = {job.run: job for job in jobs.jobs(70, 3)}
    for job in jobs.jobs(70, 3, Pace.LONG):
        before, after = drawn[job.run].setting, job.setting
        times = after.steps / before.steps
        assert 1.69 < times < 2.51
        assert (after.lr, after.batch, after.task) == (before.lr, before.batch, before.task)
        for old, new in zip(before.faults, after.faults, strict=True):
            assert new.start == pytest.approx(1 if old.start == 1 else times * old.start, rel=0.02)
            assert new.ramp == pytest.approx(times * old.ramp, rel=0.02, abs=1)
            lasts = old.end and old.end - old.start
            assert (new.end and new.end - new.start) == pytest.approx(
                times * lasts if old.ramp and lasts else lasts, abs=2
            )


def test_a_larger_batch_is_the_same_run_with_more_responses(jobs):
    small, large = jobs.jobs(40, 3), jobs.jobs(40, 3, batch=4)

    assert [replace(job, setting=replace(job.setting, batch=4 * job.setting.batch)) for job in small] == large


def without_nan(columns):
    return {name: [None if v is None or math.isnan(v) else v for v in values] for name, values in columns.items()}


def test_a_failing_run_is_recorded_under_canonical_names_with_its_hidden_truth(flipped):
    """What our taps measured, every step; the accuracy is that of the policy, whatever engine and reward say."""
    columns, end = flipped

    assert end == "finished"
    assert columns["step"] == [1, 2, 3, 4, 5, 6]
    assert {"policy/entropy", "optim/grad_norm", "mismatch/k3", "len/mean", "lld/negative_push"} <= set(columns)
    assert [reward > 0 for reward in columns["reward/mean"]] == [True, True, False, False, False, False]
    assert all(0.1 < acc < 0.8 for acc in columns["truth/acc"])
    assert columns["truth/nan"] == columns["truth/skipped"] == [0.0] * 6
    assert columns["truth/heldout"] == [None] * 6, "every tenth step"


def test_nothing_of_the_clock_and_no_single_layer_is_in_a_run(flipped):
    """So that the same seed gives the same table on any machine of the kind."""
    columns, _ = flipped

    assert [n for n in columns if n.startswith(("time/", "text/", "grad_layer/", "system/"))] == []


@pytest.mark.thorough
def test_a_seed_gives_one_table(flipped, short, starts):
    """NaN where it was NaN, null where it was null."""
    from forecast.trl_runs import train

    again, _ = train(short("trl_sign_flip", trainer="grpo", reward="exact", engine="bfloat16", beta=0.0), starts)

    assert without_nan(again) == without_nan(flipped[0])


@pytest.mark.thorough
def test_a_healthy_run_has_a_file_that_says_what_it_is(short, tmp_path, starts):
    """RLOO samples itself, so there is no mismatch to measure; a run that has its file is not made again."""
    import pyarrow.parquet as pq
    from forecast.tables import read_info
    from forecast.trl_runs import make

    (tmp_path / "starts").symlink_to(starts)
    job = short("trl_rloo")
    line = make(job, tmp_path)
    path = tmp_path / f"{job.run}.parquet"
    table, info = pq.read_table(path), read_info(path)

    assert "6 steps" in line
    assert (info["recipe"], info["family"], info["source"], info["fault_step"]) == ("trl_rloo", "healthy", "trl", None)
    assert json.loads(info["config"])["trainer"] == "rloo"
    assert table.column("run").to_pylist() == [job.run] * 6
    assert not [name for name in table.column_names if name.startswith("mismatch/")]
    assert make(job, tmp_path).endswith("there already")


@pytest.mark.thorough
def test_a_run_whose_weights_are_lost_says_when(short, starts):
    """From step 3 on the weights are not finite; TRL cannot sample from them, and what was recorded is kept."""
    from forecast.trl_runs import train

    columns, end = train(short("trl_lost_weight", engine=""), starts)

    assert columns["truth/nan"] == [0.0, 0.0, 1.0]
    assert end.startswith("RuntimeError: probability tensor")


@pytest.mark.thorough
def test_an_update_that_overflows_is_skipped_and_told(short, starts):
    """As with a float16 loss scaler: the weights stay finite."""
    from forecast.trl_runs import train

    columns, _ = train(short("trl_fp16_skip", engine="", beta=0.0), starts)

    assert columns["truth/skipped"] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert columns["truth/nan"] == [0.0] * 6


@pytest.mark.thorough
def test_an_engine_grows_old_step_by_step(short, starts):
    """Half a step more from step 2 on: weights are taken over at each step until every second one is due at step 5."""
    from forecast.trl_runs import train
    from forecast.trl_setting import Fault

    ageing = (Fault("engine staleness", 2, 12.0, 24),)
    columns, end = train(
        short("trl_stale_level", trainer="grpo", engine="float32", engine_noise=0.0, faults=ageing), starts
    )

    assert end == "finished"
    assert [gap > 1e-7 for gap in columns["mismatch/k3"]] == [False, False, False, False, True, False]


def test_every_recipe_draws_settings_that_a_trainer_can_have(recipes, jobs):
    """Batches hold whole groups; an engine's fault has an engine; what is to be changed live was there at first."""
    from forecast.trl_setting import FAULTS

    for recipe in recipes.RECIPES:
        for number in range(20):
            job = jobs.draw(recipe, 1, number)
            setting, kinds = job.setting, {fault.kind for fault in job.setting.faults}
            assert kinds <= set(FAULTS)
            assert setting.batch // setting.accumulation % setting.generations == 0
            assert setting.engine or not any(kind.startswith("engine") for kind in kinds), recipe.name
            assert setting.trainer == "grpo" or not setting.engine, "RLOO throws an engine's log-probs away"
            assert setting.beta or "kl weight" not in kinds
            assert setting.entropy_coef or "entropy weight" not in kinds
            assert recipe.healthy or job.fault_step < setting.steps
            assert not kinds or job.fault_step >= 42, "after the baseline"


def test_a_run_is_told_from_a_sound_one_by_its_fault_alone(recipes, jobs):
    """What trains too fast in the end began at a rate at which sound runs learn, so that its twin is a sound run."""
    lowest, highest = 1e-4, 3e-4
    for recipe in recipes.RECIPES:
        if recipe.name == "trl_lr_constant":
            continue
        rates = [jobs.draw(recipe, 1, number).setting.lr for number in range(20)]
        assert lowest <= min(rates) < 1.6e-4 < 1.9e-4 < max(rates) <= highest, recipe.name


@pytest.mark.thorough
def test_every_recipe_builds(recipes, jobs, starts, tmp_path):
    """A trainer with its faults in place."""
    from forecast.trl_trainer import make_trainer, quiet

    quiet()
    for recipe in recipes.RECIPES:
        setting = replace(jobs.draw(recipe, 1, 0).setting, task="sort", start=0)
        trainer, truth = make_trainer(setting, 1, starts, tmp_path)
        assert trainer.args.max_steps == setting.steps
        assert truth.columns([1]) == {f"truth/{name}": [None] for name in ("acc", "heldout", "nan", "skipped")}


def test_any_prefix_of_the_jobs_is_mixed_and_a_seed_gives_one_list(jobs):
    """More than a third of the first forty runs are healthy, more than ten recipes fail."""
    first = jobs.jobs(40, seed=1)
    failing = {job.recipe for job in first if job.family != "healthy"}

    assert first == jobs.jobs(84, seed=1)[:40]
    assert first != jobs.jobs(40, seed=2)
    assert len({job.run for job in first}) == 40
    assert len(failing) > 10
    assert 40 - sum(job.family != "healthy" for job in first) > 13


def test_a_twin_is_the_same_run_without_its_fault(jobs):
    """Same seed, same settings, and it says whose twin it is."""
    made = jobs.jobs(200, seed=1)
    by_name = {job.run: job for job in made}
    twins = [job for job in made if job.pair]

    assert twins
    for twin in twins:
        failing = by_name[twin.pair]
        assert twin.seed == failing.seed
        assert twin.setting == replace(failing.setting, faults=())
        assert (twin.family, twin.fault_step) == ("healthy", None)


def test_a_growing_fault_grows_the_learning_rate_by_a_factor_a_step():
    """From one rate to ``strength`` times it."""
    from forecast.trl_setting import Fault, Setting

    setting = Setting(lr=1e-3, faults=(Fault("learning rate", start=11, strength=100.0, ramp=10),))
    rates = np.array([setting.lr_at(step) for step in range(10, 22)])

    assert rates[0] == 1e-3
    assert rates[1:11] / rates[:10] == pytest.approx(100 ** (1 / 10))
    assert rates[10] == rates[11] == pytest.approx(0.1)
