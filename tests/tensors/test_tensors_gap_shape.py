"""The shape of the gap between engine and trainer: oracles in float64, splits, what is missing, and planted causes."""

import dataclasses
import itertools
import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import CountWaits

from rlwatch.metrics import BY_NAME
from rlwatch.tensors.gap_shape import observe_gap_shape
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.mismatch import observe_mismatch
from rlwatch.tensors.tokens import TokenBatch
from rlwatch.tensors.transfer import Transfer, pack, unpack

pytestmark = pytest.mark.torch
D = torch.float64
TENSORS = ("logp", "mask", "entropy", "rollout_logp", "staleness")


def batch(rows=6, width=9, *, seed=0, noise=0.5, dtype=D):
    """Rows of unequal length, one may be empty; some tokens are not counted, some not scored by the engine."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=D)  # noqa: E731
    trainer = -3 * draw(rows, width)
    rollout = trainer + noise * (draw(rows, width) - 0.5)
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    return TokenBatch(
        logp=trainer.to(dtype),
        mask=(torch.arange(width) < lengths.unsqueeze(1)) & (draw(rows, width) < 0.9),
        entropy=(2 * draw(rows, width)).to(dtype),
        rollout_logp=rollout.masked_fill(draw(rows, width) < 0.05, math.nan).to(dtype),
        staleness=torch.randint(0, 4, (rows,), generator=g),
    )


def part(whole, rows):
    return dataclasses.replace(whole, **{name: getattr(whole, name)[rows] for name in TENSORS})


def numbers(stats):
    """name -> value of what was measured."""
    settled = {name.removeprefix("mismatch/"): stat.settle() for name, stat in stats.items()}
    return {name: stat.value().item() for name, stat in settled.items() if stat.count > 0}


def tokens_of(b):
    """Plain Python: for each response its scored tokens as (trainer, rollout, entropy), None where one is left out."""
    rows = []
    for i in range(len(b.mask)):
        row = [
            (b.logp[i, j].item(), b.rollout_logp[i, j].item(), b.entropy[i, j].item())
            if b.mask[i, j] and not math.isnan(b.rollout_logp[i, j])
            else None
            for j in range(b.mask.shape[1])
        ]
        rows.append(row)
    return rows


def line(pairs):
    """Least squares slope of y on x, and Pearson's correlation."""
    n = len(pairs)
    mx, my = math.fsum(x for x, _ in pairs) / n, math.fsum(y for _, y in pairs) / n
    xx, yy = math.fsum((x - mx) ** 2 for x, _ in pairs), math.fsum((y - my) ** 2 for _, y in pairs)
    xy = math.fsum((x - mx) * (y - my) for x, y in pairs)
    return xy / xx, xy / math.sqrt(xx * yy)


def oracle(b):
    """Every statistic, written out over lists of floats."""
    rows = tokens_of(b)
    flat = [
        (p, q, h, age) for row, age in zip(rows, b.staleness.tolist(), strict=True) for p, q, h in filter(None, row)
    ]
    gaps = [p - q for p, q, *_ in flat]
    first, rest = ([], []), ([], [])
    for row in rows:
        lead = next((j for j, token in enumerate(row) if token is not None), None)
        for j, token in enumerate(row):
            if token is not None:
                size, room = first if j == lead else rest
                size.append(abs(token[0] - token[1]))
                room.append(1 - math.exp(token[0]))
    line_x, early, late, rooms = [p + h for p, _, h, _ in flat], [], [], ([], [])
    for row in rows:
        known = [token for token in row if token is not None]
        for place, (p, q, _) in enumerate(known):
            second = 2 * (place + 1) > len(known)
            (late if second else early).append(abs(p - q))
            rooms[second].append(1 - math.exp(p))
    xx, yy = math.fsum(x * x for x in line_x), math.fsum(d * d for d in gaps)
    xy = math.fsum(x * d for x, d in zip(line_x, gaps, strict=True))
    return {
        "below_frac": sum(d <= 0 for d in gaps) / len(gaps),
        "above_share": math.fsum(max(d, 0) for d in gaps) / math.fsum(map(abs, gaps)),
        "logp_slope": line([((p + q) / 2, p - q) for p, q, *_ in flat])[0],
        "logp_corr": line([((p + q) / 2, p - q) for p, q, *_ in flat])[1],
        "engine_temperature": 1 / (1 - xy / xx),
        "temperature_share": xy**2 / (xx * yy),
        "late_ratio": math.fsum(late) / math.fsum(rooms[1]) / (math.fsum(early) / math.fsum(rooms[0])),
        "template_ratio": math.fsum(first[0]) / math.fsum(first[1]) / (math.fsum(rest[0]) / math.fsum(rest[1])),
        "template_share": math.fsum(first[0]) / math.fsum(first[0] + rest[0]),
        "absdiff_per_version": line([(age, abs(p - q)) for p, q, _, age in flat])[0],
    }


@pytest.mark.parametrize("seed", range(6))
def test_every_statistic_equals_its_definition_in_plain_floats(seed):
    """Written out over lists, token by token, with exact sums."""
    b = batch(8, 14, seed=seed)

    got = {name: stat.value() for name, stat in observe_gap_shape(b).items()}

    assert numbers(observe_gap_shape(b)) == pytest.approx(oracle(b), rel=1e-7)  # a share of tokens is a float32
    assert {name: got[f"mismatch/{name}"].item() for name in oracle(b) if got[f"mismatch/{name}"].dtype == D} == (
        pytest.approx({name: x for name, x in oracle(b).items() if name != "below_frac"}, rel=1e-10)
    )


@settings(deadline=None)
@given(st.integers(0, 500), st.lists(st.integers(0, 6), max_size=4))
def test_any_split_into_micro_batches_merges_to_the_whole(seed, cuts):
    """Parts may be empty or wholly masked."""
    whole = batch(seed=seed)
    parts = [observe_gap_shape(part(whole, slice(a, b))) for a, b in itertools.pairwise([0, *sorted(cuts), 6])]

    merged, one = numbers(reduce(merge, parts)), numbers(observe_gap_shape(whole))

    assert merged == pytest.approx(one, rel=1e-9, abs=1e-12)


def test_two_ranks_add_up_after_the_way_over_the_link():
    """Taken apart, sent as arrays, and put together: the number of one process that saw all."""
    whole = batch(seed=3)
    first, second = (observe_gap_shape(part(whole, rows)) for rows in (slice(0, 2), slice(2, 6)))
    layout, tensors = pack(second)
    sent = unpack(layout, Transfer(tensors).read())

    assert numbers(merge_ranks(first, sent)) == pytest.approx(numbers(observe_gap_shape(whole)), rel=1e-7)


def test_every_name_is_in_the_table_and_within_its_range():
    """Whatever the batch."""
    for seed in range(8):
        for name, value in numbers(observe_gap_shape(batch(seed=seed, noise=4.0))).items():
            row = BY_NAME[f"mismatch/{name}"]
            assert row.low is None or value >= row.low, name
            assert row.high is None or value <= row.high, name


def test_a_nan_of_the_trainer_shows_in_every_statistic_and_a_nan_of_the_engine_in_none():
    """The one is a broken trainer; the other could not be scored, and is counted elsewhere."""
    b = batch(4, 12, seed=1)
    place = tuple((b.mask & ~b.rollout_logp.isnan()).nonzero()[0].tolist())
    broken, unscored = b.logp.clone(), b.rollout_logp.clone()
    broken[place], unscored[place] = math.nan, math.nan
    less = b.mask.clone()
    less[place] = False

    nan = numbers(observe_gap_shape(dataclasses.replace(b, logp=broken)))
    left = numbers(observe_gap_shape(dataclasses.replace(b, rollout_logp=unscored)))

    assert len(nan) == len(oracle(b))
    assert all(math.isnan(value) for value in nan.values())
    assert left == pytest.approx(numbers(observe_gap_shape(dataclasses.replace(b, mask=less))))


def test_what_is_not_given_is_absent_and_what_cannot_be_told_too():
    """No engine: nothing. No entropy: no temperature. One age: no slope on it. No gap: no sides of it."""
    b = batch(seed=2)
    bare = dataclasses.replace(b, entropy=None, staleness=None)
    alike = dataclasses.replace(b, rollout_logp=b.logp, staleness=torch.full((6,), 3))

    assert observe_gap_shape(dataclasses.replace(b, rollout_logp=None)) == {}
    assert numbers(observe_gap_shape(bare)).keys() == {
        "below_frac", "above_share", "logp_slope", "logp_corr", "late_ratio", "template_ratio", "template_share",
    }  # fmt: skip
    assert numbers(observe_gap_shape(alike)) == {"below_frac": 1.0, "logp_slope": 0.0}


@pytest.mark.parametrize(("rows", "width"), [(0, 9), (6, 0), (0, 0), (3, 1)])
def test_batches_without_tokens_or_of_one_token_raise_nothing(rows, width):
    """A response of one token has no first half."""
    assert "late_ratio" not in numbers(observe_gap_shape(batch(rows, width)))


def test_junk_behind_the_mask_changes_nothing():
    """NaN and infinities of padding."""
    b = batch(seed=4)
    off = ~b.mask
    dirty = {name: getattr(b, name).masked_fill(off, junk) for name, junk in
             (("logp", math.nan), ("entropy", math.inf), ("rollout_logp", -math.inf))}  # fmt: skip

    assert numbers(observe_gap_shape(dataclasses.replace(b, **dirty))) == numbers(observe_gap_shape(b))


def test_nothing_waits_for_a_device():
    """No scalar is read and no shape depends on data: observed, merged, settled."""
    b = batch()
    with CountWaits() as count:
        [stat.settle().value() for stat in merge(observe_gap_shape(b), observe_gap_shape(b)).values()]

    assert count.seen == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_batch_in_lower_precision_keeps_three_digits_of_its_own_values(dtype):
    """20,000 tokens: sums are taken in higher precision than the input."""
    low = batch(40, 500, noise=0.2, dtype=dtype)
    high = dataclasses.replace(low, **{n: getattr(low, n).double() for n in ("logp", "rollout_logp", "entropy")})

    assert numbers(observe_gap_shape(low)) == pytest.approx(numbers(observe_gap_shape(high)), rel=2e-3, abs=1e-6)


# Causes of which the truth is known exactly.

VOCABULARY = 50


def sampled(engine_of, *, seed=0, rows=48, width=64, noise=0.0, growth=0.0):
    """Tokens drawn by an engine whose log-probs (..., V) are those of ``engine_of`` the trainer's, with logit noise."""
    g = torch.Generator().manual_seed(seed)
    spread = 1 + 4 * torch.rand(rows, width, 1, generator=g, dtype=D)
    logits = spread * torch.randn(rows, width, VOCABULARY, generator=g, dtype=D)
    trainer = logits.log_softmax(-1)
    size = noise * (1 + growth * torch.arange(width, dtype=D) / width).view(1, width, 1)
    engine = engine_of((logits + size * torch.randn(logits.shape, generator=g, dtype=D)).log_softmax(-1))
    drawn = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(rows, width, 1)
    return TokenBatch(
        logp=trainer.gather(2, drawn).squeeze(2),
        mask=torch.ones(rows, width, dtype=torch.bool),
        entropy=-(trainer.exp() * trainer).sum(-1),
        rollout_logp=engine.gather(2, drawn).squeeze(2),
    )


def truncated(top_k):
    return lambda logp: logp.masked_fill(logp < logp.topk(top_k).values[..., -1:], -math.inf).log_softmax(-1)


def test_of_truncated_sampling_nothing_lies_above_and_the_mean_weight_is_the_kept_mass():
    """Exactly, token by token; with the rounding of half precision beside it a few thousandths lie above."""
    exact, rounded = sampled(truncated(4)), sampled(truncated(4), noise=0.003)
    kept = (exact.logp - exact.rollout_logp).exp().mean().item()

    assert numbers(observe_gap_shape(exact))["below_frac"] == 1.0
    assert numbers(observe_gap_shape(exact))["above_share"] == pytest.approx(0.0, abs=1e-12)
    assert numbers(observe_mismatch(exact))["weight_mean"] == pytest.approx(kept)
    assert kept < 0.9
    assert numbers(observe_gap_shape(rounded))["above_share"] < 0.02


@pytest.mark.parametrize("temperature", [0.9, 1.05, 1.2])
def test_a_temperature_is_found_with_its_value_and_explains_the_gap(temperature):
    """To first order: within 2 % of the truth, and more than nine tenths of the squared gap."""
    got = numbers(observe_gap_shape(sampled(lambda logp: (logp / temperature).log_softmax(-1))))

    assert got["engine_temperature"] == pytest.approx(temperature, rel=0.02)
    assert got["temperature_share"] > 0.9
    assert math.copysign(1, got["logp_slope"]) == math.copysign(1, temperature - 1)


def test_a_noise_is_on_both_sides_and_neither_a_temperature_nor_a_place():
    """Half precision: about as much above as below, nothing explained, as large at the end as at the beginning."""
    got = numbers(observe_gap_shape(sampled(lambda logp: logp, noise=0.02)))

    assert 0.4 < got["above_share"] < 0.6
    assert got["temperature_share"] < 0.05
    assert got["late_ratio"] == pytest.approx(1.0, abs=0.1)
    assert abs(got["logp_corr"]) < 0.1


def test_a_noise_that_grows_along_the_response_shows_in_the_late_ratio():
    """From s at the first token to 3 s at the last: 2.5 s over 1.5 s."""
    got = numbers(observe_gap_shape(sampled(lambda logp: logp, noise=0.02, growth=2.0)))

    assert got["late_ratio"] == pytest.approx(5 / 3, rel=0.1)


def test_the_late_ratio_stays_at_one_where_responses_only_end_surer():
    """The plain size of the gap falls by a third there, because a sure token has no room for a noise."""
    g = torch.Generator().manual_seed(5)
    sharp = torch.linspace(1.0, 6.0, 64, dtype=D).view(1, 64, 1)
    logits = sharp * torch.randn(48, 64, VOCABULARY, generator=g, dtype=D)
    engine = (logits + 0.02 * torch.randn(logits.shape, generator=g, dtype=D)).log_softmax(-1)
    drawn = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=g).view(48, 64, 1)
    logp, rollout = (x.gather(2, drawn).squeeze(2) for x in (logits.log_softmax(-1), engine))
    got = numbers(observe_gap_shape(TokenBatch(logp=logp, mask=torch.ones(48, 64), rollout_logp=rollout)))
    size = (logp - rollout).abs()

    assert size[:, 32:].mean() < 0.7 * size[:, :32].mean()
    assert got["late_ratio"] == pytest.approx(1.0, abs=0.15)


def test_a_gap_that_grows_with_age_is_a_slope_per_version():
    """|d| is .01 nats a version, on either side."""
    b = batch(6, 20, seed=7)
    ages = torch.tensor([0, 1, 2, 3, 1, 2])
    sides = torch.where(torch.arange(20) % 2 == 0, 1.0, -1.0).double()
    aged = dataclasses.replace(b, rollout_logp=b.logp - 0.01 * ages.unsqueeze(1) * sides, staleness=ages)

    assert numbers(observe_gap_shape(aged))["absdiff_per_version"] == pytest.approx(0.01)
