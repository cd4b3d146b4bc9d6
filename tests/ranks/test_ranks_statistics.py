"""Two and four gloo processes record what one process records of the whole batch."""

import pytest
from several import each_of, recorded
from tallying import SPIKE, STEPS, tally_steps

import rlwatch

pytestmark = pytest.mark.torch

RANKS = "rlwatch/ranks"
PICKED = ("max", "min")
QUANTILES = ("p50", "p90", "p99")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The whole batch in one process."""
    store = tmp_path_factory.mktemp("one")
    with rlwatch.init(store=store, run_id="r", sigterm=False) as run:
        tally_steps(run, 0, 1)
    return store


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in (2, 4)}
    returned = each_of(*(("tallying:statistics", ranks, folder) for ranks, folder in folders.items()))
    return {ranks: (ranks, folder, what) for (ranks, folder), what in zip(folders.items(), returned, strict=True)}


@pytest.fixture(params=[2, 4])
def many(request, played):
    """(how many, where, what each rank returned)."""
    return played[request.param]


def test_every_statistic_is_that_of_the_whole_batch(many, one_process):
    """Unequal shards, and an empty one among the four: nothing is missing, nothing is weighted wrongly."""
    ranks, folder, _ = many
    whole, parts = recorded(one_process, "r"), recorded(folder / "store", "r")

    assert list(parts) == list(whole) == list(range(1, STEPS + 1))
    for step, expected in whole.items():
        assert parts[step].pop(RANKS) == ranks
        assert parts[step].keys() == expected.keys()
        for name, value in expected.items():
            assert parts[step][name] == pytest.approx(value, rel=1e-6, abs=1e-7), (step, name)


def test_what_is_counted_or_picked_from_the_values_is_exact(many, one_process):
    """Extremes and numbers of tokens bit for bit, quantiles to the last bit of one process's single precision."""
    _, folder, _ = many
    whole, parts = recorded(one_process, "r"), recorded(folder / "store", "r")
    exact = [name for name in whole[1] if name.rpartition("/")[2] in PICKED or name.startswith("nonfinite/")]
    between = [name for name in whole[1] if name.rpartition("/")[2] in QUANTILES]

    assert len(exact) > 10
    assert len(between) > 2
    for step, expected in whole.items():
        assert {n: parts[step][n] for n in exact} == {n: expected[n] for n in exact}
        assert [parts[step][n] for n in between] == pytest.approx([expected[n] for n in between], rel=2e-7)


def test_numbers_the_trainer_computed_over_all_ranks_are_rank_0s(many):
    """The others have others, for whatever reason."""
    _, folder, _ = many

    assert {step["policy/kl_coef"] for step in recorded(folder / "store", "r").values()} == {0.1}


def test_only_rank_0_records_and_all_of_them_measure(many):
    """And every rank leaves in time, with nothing lost."""
    ranks, _, returned = many

    assert [r["state"] for r in returned] == [[True, True, True]] + [[False, True, True]] * (ranks - 1)
    assert all(r["finished"] and r["counters"] == {} for r in returned)


def test_extreme_tokens_of_all_ranks_are_recorded_with_their_rank(many, one_process):
    """The row is that of the rank's own share; text is decoded where the tokens are."""
    ranks, folder, _ = many
    owner = ranks - 1  # the last rank has row 10 of 12
    first = {2: 5, 4: 9}[ranks]
    batches = rlwatch.open_store(folder / "store").spikes("r")
    (row,) = [b for b in batches if b.step == 1 and b.rank == owner]

    assert [b.rank for b in batches] == [owner] * STEPS
    assert list(row.columns["sequence"]) == [SPIKE["row"] - first]
    assert list(row.columns["position"]) == [SPIKE["position"]]
    assert row.columns["text"][0] == f"<{row.columns['token_id'][0]}>"
