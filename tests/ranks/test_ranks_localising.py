"""A step localised on two and four ranks, under DDP and FSDP2: what one process finds, and training that goes on."""

import pytest
from localising_alike import OF_FOUR, ONE_OF_A_KIND, REPLICATED, SHARDED, TRAINED
from localising_step import EQUAL, TOP, UNEQUAL, alone
from localising_traces import FAULTS, POSITION, ROW, traced
from several import each_of

pytestmark = pytest.mark.torch
RANKS = [2, 4]
KINDS = [*((2, how) for how in SHARDED), *((4, how) for how in OF_FOUR)]


def scenario(ranks, how):
    """The test's parameters: the fixture that has it, and these two; what is not one of a kind is for ``make thorough``."""
    if how in ONE_OF_A_KIND[ranks]:
        return pytest.param("sharded", ranks, how)
    return pytest.param("sharded_otherwise", ranks, how, marks=pytest.mark.thorough)


EXACT = [scenario(ranks, how) for ranks, how in KINDS if "half" not in how]
HALF = [scenario(ranks, how) for ranks, how in KINDS if "half" in how]


def played(name, tmp_path_factory):
    """Ranks -> what each of them returned."""
    folders = {ranks: tmp_path_factory.mktemp(f"{name}{ranks}") for ranks in RANKS}
    returned = each_of(*((f"localising_alike:{name}", ranks, folder) for ranks, folder in folders.items()))
    return dict(zip(RANKS, returned, strict=True))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return played("replicated", tmp_path_factory)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return played("sharded", tmp_path_factory)


@pytest.fixture(scope="module")
def sharded_otherwise(tmp_path_factory):
    return played("sharded_otherwise", tmp_path_factory)


@pytest.fixture(scope="module")
def one_process():
    """What one process finds that has all micro-batches of all ranks."""
    known = {}

    def found(groups, tie):
        key = str(groups), tie
        if key not in known:
            known[key] = alone(groups, tie=tie)
        return known[key]

    return found


def largest(table):
    return max(abs(value) for row in table.values() for value in row)


def apart(found, truth, method):
    """Largest difference of the contributions of all ranks from those of one process, in parts of the largest."""
    every = {row: line for rank in found for row, line in rank["contributions"][method].items()}
    expected = truth["contributions"][method]
    assert every.keys() == expected.keys()
    pairs = ((a, b) for row, line in expected.items() for a, b in zip(every[row], line, strict=True))
    return max(abs(a - b) for a, b in pairs) / largest(expected)


def assert_as_one_process(found, truth):
    """Norm, layers, contributions, the order of tokens, own norms and their layers, on every rank."""
    assert apart(found, truth, "fd") < 1e-4
    assert apart(found, truth, "jvp") < 1e-5
    for rank in found:
        assert rank["norm"] == pytest.approx(truth["norm"], rel=1e-6)
        assert rank["layers"] == pytest.approx(truth["layers"], abs=1e-6)
        assert abs(rank["gap"]["fd"]) < 1e-3
        assert abs(rank["gap"]["jvp"]) < 1e-6
        assert rank["top"] == truth["top"]
        assert rank["candidates"] == truth["candidates"]
        assert list(rank["own"]) == truth["candidates"]
        assert rank["own"] == pytest.approx(truth["own"], rel=1e-5)
        for token, shares in truth["shares"].items():
            assert rank["shares"][token] == pytest.approx(shares, abs=1e-5)
        assert rank["notes"] == []
        assert rank["traced"] == ["nothing", False]
        assert rank["same"]


@pytest.mark.parametrize("ranks", RANKS)
def test_under_ddp_every_rank_finds_what_one_process_finds(replicated, one_process, ranks):
    """With unequal numbers of micro-batches, and of four ranks one without any."""
    found = [rank["step"] for rank in replicated[ranks]]

    assert_as_one_process(found, one_process(UNEQUAL[ranks], True))


@pytest.mark.parametrize(("played_in", "ranks", "how"), EXACT)
def test_under_fsdp2_every_rank_finds_what_one_process_finds(request, one_process, played_in, ranks, how):
    """Whether it gathers weights anew for the backward or keeps them, recomputes activations, or copies shards."""
    found = [rank["step"][how] for rank in request.getfixturevalue(played_in)[ranks]]
    truth = one_process(EQUAL[ranks], how != "untied")

    assert_as_one_process(found, truth)
    assert truth["cures"]["clip advantages"] < 0.9 * truth["norm"]
    for rank in found:
        assert rank["cures"] == pytest.approx(truth["cures"], rel=1e-4)


@pytest.mark.parametrize(("played_in", "ranks", "how"), HALF)
def test_in_half_precision_fsdp2_finds_the_same_within_its_rounding(request, one_process, played_in, ranks, how):
    """Coefficients and gradients are those of bfloat16; what is looked at runs in float32."""
    found = [rank["step"][how] for rank in request.getfixturevalue(played_in)[ranks]]
    truth = one_process(EQUAL[ranks], True)

    for method in ("fd", "jvp"):
        assert apart(found, truth, method) < 1e-2
    for rank in found:
        assert rank["norm"] == pytest.approx(truth["norm"], rel=1e-2)
        assert rank["complete"] == {"fd": True, "jvp": True}
        assert abs(rank["gap"]["fd"]) < 1e-2
        assert len(set(rank["top"]) & set(truth["top"])) >= TOP - 3
        assert rank["top"][:3] == truth["top"][:3]
        assert list(rank["own"]) == rank["candidates"]
        for token in truth["top"][:3]:
            assert rank["own"][token] == pytest.approx(truth["own"][token], rel=2e-2)
        assert rank["cures"] == pytest.approx(truth["cures"], rel=5e-2)
        assert rank["same"]


@pytest.mark.parametrize(("ranks", "how"), [*((2, how) for how in REPLICATED), (4, "plain")])
def test_training_under_ddp_does_not_notice(replicated, ranks, how):
    """Weights, gradients, moments, buffers and random state of every rank, bit for bit, localised at every step.

    Before its buckets are rebuilt and after, and through a wrapper that the loop does not show.
    """
    for rank in replicated[ranks]:
        unwatched, watched = rank["trained"][how]

        assert watched == unwatched


@pytest.mark.parametrize(("ranks", "how"), [(ranks, how) for ranks, kinds in TRAINED.items() for how in kinds])
def test_training_under_fsdp2_does_not_notice(sharded, ranks, how):
    """Each rank's shards, bit for bit, localised at every step."""
    for rank in sharded[ranks]:
        unwatched, watched = rank["trained"][how]

        assert watched == unwatched


def test_what_fsdp2_left_gathered_has_to_be_given_back_first(sharded):
    """Where that is left out, shards of gradients meet whole weights, and nothing is localised."""
    for rank in sharded[2]:
        assert "could not be computed" in rank["never resharded"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("wrap", "ranks"),
    [
        ("replicated", 2), ("replicated", 4), ("sharded", 2),
        pytest.param("sharded_otherwise", 4, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_traced_to_where_one_process_finds_it(request, wrap, ranks, fault):
    """By the rank that has it; the others know that one has. Weights are broken on all ranks, or in one's shard."""
    groups = UNEQUAL[ranks] if wrap == "replicated" else EQUAL[ranks]
    truth = traced(lambda model: model, fault, [[rows for mine in groups for rows in mine]], 0, 1)
    traces = [rank["traced"][fault] for rank in request.getfixturevalue(wrap)[ranks]]
    owners = [trace for trace in traces if trace["found"]]

    assert truth["found"]
    assert truth["at"] == (None if fault == "weight" else [ROW, POSITION])
    assert owners == [truth] * (ranks if (wrap, fault) == ("replicated", "weight") else 1)
    assert all(trace["elsewhere"] != trace["found"] for trace in traces)
    assert all(trace["same"] for trace in traces)
