"""What a batch says as a whole against published and hand-computed numbers, and which tokens it points at."""

import math

import pytest
import torch

from rlwatch.tensors.degeneration import degeneration_stats
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.importance import sequence_log_ratio, sequence_ratio_stats
from rlwatch.tensors.mergeable import Ess
from rlwatch.tensors.mismatch import LogProbGap, gap_stats
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import SpikeTable, TokenBatch, spike_score, top_tokens

pytestmark = pytest.mark.torch
D = torch.float64
OLD = torch.tensor([[-0.1, -0.7, -2.0, -0.3], [-1.2, -0.4, -9, -9]], dtype=D)
ROLL = torch.tensor([[-0.1, -0.5, -1.0, -0.35], [-3.0, -0.5, -9, -9]], dtype=D)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def values(stats):
    return {name: stat.value().item() for name, stat in stats.items()}


def batch(logp, **columns):
    """One response, all tokens counted; columns as lists."""
    x = torch.tensor([logp], dtype=D)
    rest = {name: torch.tensor([column], dtype=D) for name, column in columns.items()}
    return TokenBatch(logp=x, mask=torch.ones_like(x), **rest)


def test_the_worked_mismatch_example_through_the_whole_batch():
    """kl -0.125, k3 0.607, mean difference 0.525; the largest is 1.8 nats."""
    got = values(observe(TokenBatch(logp=OLD + 0.3, old_logp=OLD, rollout_logp=ROLL, mask=MASK)))

    assert got["mismatch/kl"] == pytest.approx(-0.125)
    assert got["mismatch/k3"] == pytest.approx(0.6071166112, abs=1e-9)
    assert got["mismatch/logp_absdiff"] == pytest.approx(0.525)
    assert got["mismatch/logp_absdiff_max"] == pytest.approx(1.8)


def test_on_policy_the_mismatch_is_that_of_the_policy_itself():
    """Without a recomputed old policy the current one stands for the weights the engine had."""
    got = values(observe(TokenBatch(logp=OLD, rollout_logp=ROLL, mask=MASK)))

    assert got["mismatch/kl"] == pytest.approx(-0.125)
    assert "ratio/mean" not in got


def test_raw_weights_are_never_truncated():
    """chi2 of the example is 5.788 and the ESS below that of weights cut at 2, which is 0.825."""
    w = (OLD - ROLL).exp()[MASK.bool()]
    ess = values(gap_stats(LogProbGap.of(OLD, ROLL, MASK)))["mismatch/ess"]

    assert (w**2).mean().item() - 1 == pytest.approx(5.7884106, abs=1e-7)
    assert ess == pytest.approx((w.mean() ** 2 / (w**2).mean()).item())
    assert ess < 0.5 < 0.8245855675


def test_right_after_a_rollout_nothing_has_moved():
    """Same log-probs: ratio 1, all weights effective, no KL, nothing clipped."""
    got = values(
        observe(TokenBatch(logp=OLD, old_logp=OLD, mask=MASK, advantages=torch.tensor([1.0, -1.0]), clip=(0.2, 0.2)))
    )

    assert {name: got[name] for name in ("ratio/mean", "ratio/max", "ratio/min")} == dict.fromkeys(
        ("ratio/mean", "ratio/max", "ratio/min"), 1.0
    )
    assert got["ratio/ess"] == pytest.approx(1.0)
    assert (got["policy/kl_old"], got["ratio/clipfrac_low"], got["ratio/clipfrac_high"]) == (0.0, 0.0, 0.0)


def test_ratios_of_whole_responses():
    """Sums -1.15 and 1.9 of the example: products, not means; a response without tokens is left out."""
    log_ratio = sequence_log_ratio(OLD, ROLL, MASK)
    padded = torch.cat([log_ratio, torch.tensor([50.0], dtype=D)])

    assert log_ratio.tolist() == pytest.approx([-1.15, 1.9])
    got = values(sequence_ratio_stats(padded, torch.tensor([1, 1, 0])))
    w = torch.tensor([-1.15, 1.9], dtype=D).exp()
    assert got["ratio/seq_mean"] == pytest.approx(w.mean().item())
    assert got["ratio/seq_max"] == pytest.approx(w.max().item())
    assert got["ratio/seq_ess"] == pytest.approx((w.sum() ** 2 / (2 * (w**2).sum())).item())


def test_effective_sample_size_is_one_over_one_plus_chi_squared():
    """For weights of mean one."""
    w = torch.tensor([0.5, 1.5, 0.25, 1.75], dtype=D)

    assert Ess.of(w.log(), torch.ones(4)).value().item() == pytest.approx(1 / (w**2).mean().item())


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 3)])
def test_advantages_a_response_and_a_token_are_both_understood(shape):
    """A response counts once, a token once if the loss counts it."""
    a = torch.tensor([1.0, -1.0, 3.0, -5.0], dtype=D)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    got = observe(
        TokenBatch(
            logp=torch.zeros(4, 3, dtype=D),
            mask=mask,
            advantages=a.view(-1, 1).expand(4, 3) if shape == (4, 3) else a.view(shape),
        )
    )

    per_token = shape == (4, 3)
    assert got["adv/mean"].value().item() == pytest.approx(1.0 if per_token else -0.5)
    assert got["adv/min"].value() == (-1.0 if per_token else -5.0)
    assert got["adv/max"].value() == 3.0
    assert got["nonfinite/advantage"].count == (9 if per_token else 4)
    assert got["adv/std"].value().item() == pytest.approx(math.sqrt(3.0) if per_token else a.std().item())


def test_lengths_count_the_masked_in_tokens_of_each_response():
    """Mean, extremes, and the share that was cut."""
    cut = torch.tensor([True, False, True, False])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])

    got = values(observe(TokenBatch(logp=torch.zeros(4, 4), mask=mask, cut=cut)))

    assert {n: got[n] for n in ("len/mean", "len/max", "len/min", "len/clipped")} == {
        "len/mean": 3.0,
        "len/max": 4.0,
        "len/min": 1.0,
        "len/clipped": 0.5,
    }


def test_every_column_has_its_own_count_of_broken_values():
    """So that the first broken tensor can be named."""
    nan, ok = [math.nan, -1.0], [-1.0, -1.0]
    got = values(observe(batch(ok, old_logp=ok, ref_logp=nan, rollout_logp=[math.inf, math.nan])))

    assert {n: got[n] for n in got if n.startswith("nonfinite/")} == {
        "nonfinite/logp": 0.0,
        "nonfinite/old_logp": 0.0,
        "nonfinite/ref_logp": 1.0,
        "nonfinite/rollout_logp": 2.0,
    }


@pytest.mark.parametrize(
    ("columns", "far"),
    [
        ({"logp": [-14.9]}, False),
        ({"logp": [-15.1]}, True),
        ({"logp": [-1.0], "old_logp": [-1.0 - math.log(9.9)]}, False),
        ({"logp": [-1.0], "old_logp": [-1.0 - math.log(10.1)]}, True),
        ({"logp": [-9.0], "old_logp": [-1.0]}, False),
        ({"logp": [-1.0], "rollout_logp": [-3.9]}, False),
        ({"logp": [-1.0], "rollout_logp": [-4.1]}, True),
        ({"logp": [-4.1], "rollout_logp": [-1.0]}, True),
        ({"logp": [-1.0], "old_logp": [-2.0], "rollout_logp": [-4.5]}, False),
        ({"logp": [-1.0], "old_logp": [-2.0], "rollout_logp": [-5.5]}, True),
    ],
)
def test_a_token_is_a_spike_from_its_limits_on(columns, far):
    """Less likely than -15 nats, ratio above 10, or engines 3 nats apart (old against rollout, where there is one)."""
    assert (spike_score(batch(**columns)).item() >= 1.0) is far


@pytest.mark.parametrize("name", ["logp", "old_logp", "rollout_logp", "ref_logp"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_value_in_any_column_is_the_worst_spike(name, bad):
    """Above every finite one, whichever tensor it is in."""
    columns = {n: [-1.0, -1.0] for n in ("logp", "old_logp", "rollout_logp", "ref_logp")}
    columns[name] = [-1.0, bad]

    score = spike_score(batch(**columns))

    assert (score[0, 0] < 1.0, score[0, 1].item()) == (True, math.inf)


def test_a_spike_row_holds_every_number_known_of_the_token():
    """Under the names of the columns, in one row."""
    whole = TokenBatch(
        logp=torch.tensor([[-1.0, -0.5]]),
        mask=torch.ones(1, 2),
        entropy=torch.tensor([[0.1, 0.2]]),
        ids=torch.tensor([[11, 12]]),
        advantages=torch.tensor([-2.0]),
        old_logp=torch.tensor([[-1.0, -8.5]]),
        ref_logp=torch.tensor([[-1.5, -0.25]]),
        rollout_logp=torch.tensor([[-1.0, -8.0]]),
    )
    table = top_tokens(whole, k=1, first_row=7)

    assert dict(zip(table.names, table.rows[0, 1:].tolist(), strict=True)) == pytest.approx(
        {
            "sequence": 7,
            "position": 1,
            "token_id": 12,
            "logp": -0.5,
            "old_logp": -8.5,
            "rollout_logp": -8.0,
            "ref_logp": -0.25,
            "ratio": math.exp(8.0),
            "advantage": -2.0,
            "entropy": 0.2,
            "screen": 2.0 * math.exp(8.0) * (1 - math.exp(-0.5)),
        }
    )
    assert table.rows[0, 0].item() == pytest.approx(8.0 / math.log(10.0))


def test_by_default_sixty_four_tokens_are_kept():
    """Of one batch, and of two merged."""
    table = top_tokens(TokenBatch(logp=-torch.rand(10, 10), mask=torch.ones(10, 10)))

    assert table.rows.shape[0] == 64
    assert table.merge(table).rows.shape[0] == 64
    assert SpikeTable(table.names, table.rows[:3]).merge(SpikeTable(table.names, table.rows[:2])).rows.shape[0] == 5


@pytest.mark.parametrize(("zeros", "share"), [(8, 0.0), (9, 1.0), (10, 1.0)])
def test_nine_tenths_of_id_0_are_a_broken_sampler(zeros, share):
    """Eight are text."""
    ids = torch.tensor([[0] * zeros + [5] * (10 - zeros)])

    assert values(degeneration_stats(ids, torch.ones_like(ids)))["text/id0_frac"] == share


def test_gradient_norms_as_metrics_of_the_step():
    """Per layer in model order, the whole, and how many tensors are broken; a shard is left out."""
    parameters = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("h.0.w", "h.0.b", "h.1.w", "h.2.w")}
    for name, grad in {"h.0.w": [3.0, 0.0], "h.0.b": [0.0, 4.0], "h.1.w": [math.inf, 0.0]}.items():
        parameters[name].grad = torch.tensor(grad)

    got = values(grad_norms(parameters.items()).stats())

    assert got == {
        "grad_layer/h.0": 5.0,
        "grad_layer/h.1": math.inf,
        "optim/grad_norm": math.inf,
        "nonfinite/grad": 1.0,
    }


@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_double_gradients_is_read_alone_and_among_narrower_ones(other):
    """3-4-5 in float64, and 12 in another type."""
    double, single = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, other))
    double.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    single.grad = torch.tensor([12.0, 0.0], dtype=other)
    norms = grad_norms([("layers.0.w", double), ("layers.1.w", single)])

    assert norms is not None
    assert (norms.squares.tolist(), norms.squares.dtype) == ([25.0, 144.0], torch.float32)
