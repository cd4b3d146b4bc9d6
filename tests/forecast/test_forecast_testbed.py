"""The small policies of ``benchmarks/forecast``: a run can be made again, and its faults do what they say."""

from dataclasses import replace

import pytest
from forecast_testbed import SMALL, Change, Config, statistics, table, torch, training, untaught, update

from rlwatch.metrics import OPEN, metric_of
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.observe import observe

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_seed_gives_one_table():
    """Bit for bit: the corpus can be made again."""
    config = Config(replace(SMALL, engine="int8", entropy=0.01, beta=0.03, flipped=0.1), steps=4)

    assert table(config) == table(config)
    assert table(config) != table(config, seed=4)


def test_a_twin_equals_its_run_until_the_fault_begins():
    """Whatever the fault is: what follows is its effect."""
    faults = [{"lr_factor": 20.0}, {"noise": 0.5, "fresh_noise": True}, {"distinct": 1}]
    for knobs in faults:
        config = Config(SMALL, (Change(3, knobs),), steps=6)
        sick, well = table(config), table(config.without_changes())

        assert {n: v[:3] for n, v in sick.items()} == {n: v[:3] for n, v in well.items()}
        assert {n: v[3:] for n, v in sick.items()} != {n: v[3:] for n, v in well.items()}, knobs


def test_training_teaches():
    """The testbed is not noise: an untaught policy learns to end its responses for a reward that wants it short."""
    config = Config(replace(SMALL, right=0.0, length_bonus=-1.0, prompts=6, lr=2e-2), steps=25)
    lengths = training.train(config, 3, untaught())["len/mean"]

    assert sum(lengths[-5:]) < 0.7 * sum(lengths[:5])


def test_columns_are_canonical_metrics_and_hidden_truths():
    """A model that reads the corpus reads a live run: the same names; what is measured now and then is absent else."""
    columns = table(Config(SMALL, steps=2))
    named = [n for n in columns if n != "step" and not n.startswith("truth/")]
    prefixes = tuple(metric.name for metric in OPEN)

    assert [n for n in named if metric_of(n) is None and not n.startswith(prefixes)] == []
    assert [n for n, values in columns.items() if values == [None, None]] == []
    assert columns["val/score"][1] is columns["truth/heldout"][1] is None
    assert set(training.TRUTHS) <= set(columns)


def test_statistics_are_those_a_watched_loop_would_log():
    """Joining the passes of a step and merging what rlwatch observes of each is the same."""
    run = training.Training(Config(replace(SMALL, minibatches=2, beta=0.1)), 3, untaught())
    seen = update.Update(
        run.policy, run.optimizer, run.config.knobs, run.batch(run.config.knobs, run.engine.sync(run.policy, SMALL))
    )
    seen.run()
    live = {}
    for view in seen.views:
        live = merge(live, observe(view))
    expected = statistics.settled(live)

    row = seen.row()

    assert len(seen.views) == 4
    assert {n: row[n] for n in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_step_that_is_not_finite_is_told_and_skipped_only_if_asked():
    """truth/nan is a NaN that got into the weights; a skipped one did not."""
    bad = (Change(1, {"bad_batch": 1.0}, until=2),)
    taken = table(Config(SMALL, bad, steps=4))
    skipped = table(Config(replace(SMALL, skip_nonfinite=True), bad, steps=4))

    assert taken["truth/nan"] == [0, 1, 1, 1]
    assert taken["truth/skipped"] == [0, 0, 0, 0]
    assert skipped["truth/nan"] == [0, 0, 0, 0]
    assert skipped["truth/skipped"] == [0, 1, 0, 0]
    assert skipped["optim/step_skipped"] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "knobs",
    [{"half_entropy": True, "lr_factor": 200.0}, {"loss_scale": 2.0**30}],
)
def test_precision_faults_end_in_nan(knobs):
    """A probability that underflows in half precision, and a gradient that overflows in it."""
    assert 1.0 in training.train(Config(SMALL, (Change(1, knobs),), steps=5), 3, untaught())["truth/nan"]


def test_a_loss_scale_changes_nothing_but_rounding_until_a_gradient_overflows():
    """So what grows in ``fp16_overflow`` cannot be seen before it strikes; the rollouts are those of a sound run."""
    sound, scaled = (
        training.train(Config(SMALL, (Change(1, {"loss_scale": scale}),), steps=4), 3, untaught())
        for scale in (0.0, 2.0**12)
    )

    assert scaled["truth/nan"] == [0.0] * 4
    assert scaled["len/mean"] == sound["len/mean"]
    for name in ("policy/entropy", "optim/grad_norm", "reward/mean"):
        assert scaled[name] == pytest.approx(sound[name], rel=0.01), name


def test_a_dead_run_ends_before_its_steps_do():
    """Some steps after NaN; never because accuracy was low from the start."""
    dead = training.train(Config(SMALL, (Change(1, {"bad_batch": 1.0}),), steps=60), 3, untaught())
    watch = training.Death()
    alive = [watch.over({"truth/acc": 0.0, "truth/nan": 0.0}) for _ in range(200)]

    assert len(dead["step"]) == 2 + training.AFTER_NAN
    assert not any(alive)


def test_a_run_whose_accuracy_fell_ends_a_while_later():
    """Long enough after it for a label to see that it stays so."""
    watch = training.Death()
    rows = [watch.over({"truth/acc": 0.6 if step < 100 else 0.0, "truth/nan": 0.0}) for step in range(200)]

    end = rows.index(True)
    assert 100 + training.AFTER_DEATH < end < 100 + training.AFTER_DEATH + 20
