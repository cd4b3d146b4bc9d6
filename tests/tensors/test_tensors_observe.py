"""One micro-batch in, canonical statistics, spikes and one transfer out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from waits import CountWaits

from rlwatch.metrics import BY_NAME
from rlwatch.tensors.entropy import token_logp_entropy
from rlwatch.tensors.gradnorm import grad_norms, layer_of
from rlwatch.tensors.mergeable import merge
from rlwatch.tensors.observe import observe
from rlwatch.tensors.tokens import TokenBatch, top_tokens
from rlwatch.tensors.transfer import Transfer

pytestmark = pytest.mark.torch


def full_batch(seed=0, rows=3, width=6):
    """A batch that measures everything."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(rows, width, generator=g)
    shift = lambda scale: logp + scale * torch.randn(rows, width, generator=g)  # noqa: E731
    return TokenBatch(
        logp=logp,
        mask=torch.tensor([[1] * (width - i) + [0] * i for i in range(rows)]),
        entropy=torch.rand(rows, width, generator=g),
        ids=torch.randint(0, 9, (rows, width), generator=g),
        advantages=torch.randn(rows, generator=g),
        old_logp=shift(0.1),
        ref_logp=shift(0.2),
        rollout_logp=shift(0.05),
        clip=(0.2, 0.28),
        dual_clip=3.0,
        staleness=torch.arange(rows),
    )


def test_every_metric_is_in_the_table():
    """Names are canonical; nothing is invented."""
    assert set(observe(full_batch())) <= set(BY_NAME)


def test_what_was_not_measured_is_absent():
    """On-policy without reference or engine there is no ratio, KL or mismatch, not a 1 or a 0."""
    got = observe(TokenBatch(logp=-torch.rand(2, 3), mask=torch.ones(2, 3)))

    assert set(got) == {"policy/logp_mean", "policy/logp_min", "nonfinite/logp"}


def test_padding_of_any_value_changes_no_statistic():
    """NaN in the padding of every tensor leaves every number as it was."""
    batch = full_batch()
    off = ~batch.mask.bool()
    dirty = TokenBatch(
        **{
            name: x.masked_fill(off, math.nan) if name.endswith(("logp", "entropy")) else x
            for name in TokenBatch.__dataclass_fields__
            if (x := getattr(batch, name)) is not None
        }
    )

    clean, other = observe(batch), observe(dirty)

    for name, stat in clean.items():
        assert stat.settle().count == other[name].settle().count, name
        assert torch.equal(stat.value().nan_to_num(-7e7), other[name].value().nan_to_num(-7e7)), name


def test_observing_never_waits_for_the_device_nor_draws_a_random_number():
    """No scalar read, no data-dependent shape, no generator touched; also while micro-batches merge and are read."""
    batch, other, layer = full_batch(), full_batch(1, width=4), torch.nn.Linear(3, 2)
    layer.weight.grad = torch.ones(2, 3)
    state = torch.get_rng_state()
    with CountWaits() as count:
        stats = [stat.settle() for stat in merge(observe(batch), observe(other)).values()]
        spikes = top_tokens(batch)
        norms = grad_norms(layer.named_parameters())
        Transfer([s.value() for s in stats] + [s.count for s in stats] + [spikes.rows, norms.norms])

    assert count.seen == []
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("missing", ["old_logp", "ref_logp", "rollout_logp", "advantages", "entropy", "ids", "clip"])
def test_nothing_waits_where_something_was_not_measured(missing):
    """Every way a batch may be incomplete, in every micro-batch or in one of two."""
    whole = full_batch()
    partial = replace(whole, **{missing: None})
    with CountWaits() as count:
        for batches in ((partial, partial), (whole, partial)):
            for stat in merge(*map(observe, batches)).values():
                stat.settle().value()
        top_tokens(partial)

    assert count.seen == []


def test_log_probs_and_entropy_of_logits_wait_for_nothing():
    """Tile by tile, with ids that are none, at a temperature."""
    logits, ids = torch.zeros(2, 3, 50, dtype=torch.bfloat16), torch.tensor([[0, 49, -100], [1, 50, 7]])
    with CountWaits() as count:
        token_logp_entropy(logits, ids, temperature=0.5, tile=16)

    assert count.seen == []


def test_no_tensor_of_rlwatch_stays_behind_on_the_cpu():
    """On a device that holds no values whatever would be read, or is on another device, is an error."""
    batch = replace(full_batch(), cut=torch.zeros(3), environment=torch.zeros(3, 6))
    tensors = {name: getattr(batch, name) for name in TokenBatch.__dataclass_fields__}
    there = {name: x.to("meta") for name, x in tensors.items() if isinstance(x, torch.Tensor)}

    settled = [stat.settle() for stat in observe(replace(batch, **there)).values()]

    assert {x.device.type for stat in settled for x in (stat.value(), stat.count)} == {"meta"}


def test_the_counting_of_waits_can_fail():
    """The guard above sees what it is there to see."""
    x = torch.ones(3)
    with CountWaits() as count:
        x.sum().item()
        x[x > 0]
        torch.rand(1)

    assert count.seen == ["_local_scalar_dense", "index", "rand"]


def test_the_most_extreme_tokens_are_kept_with_their_numbers():
    """Non-finite first, then the far ones, never the padding."""
    logp = torch.tensor([[-0.1, -20.0, -0.2], [math.nan, -0.3, -99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = TokenBatch(
        logp=logp, mask=mask, ids=torch.tensor([[5, 6, 7], [8, 9, 1]]), advantages=torch.tensor([1.0, -2.0])
    )

    table = top_tokens(batch, k=2, first_row=10)
    rows = {int(r[1]): dict(zip(("score", *table.names), r.tolist(), strict=True)) for r in table.rows}

    assert set(rows) == {10, 11}
    assert rows[11]["score"] == math.inf
    assert rows[11]["token_id"] == 8
    assert rows[10]["score"] == pytest.approx(20 / 15)
    assert rows[10]["position"] == 1
    assert rows[10]["advantage"] == 1.0
    assert "ratio" not in rows[10]


def test_merged_spike_tables_keep_the_worst_of_both():
    """Over micro-batches the k worst survive, whichever piece they came from."""
    tables = [top_tokens(full_batch(seed), k=4, first_row=100 * seed) for seed in range(3)]
    scores = torch.cat([t.rows[:, 0] for t in tables]).sort(descending=True).values[:4]

    merged = tables[0].merge(tables[1], k=4).merge(tables[2], k=4)

    assert torch.equal(merged.rows[:, 0].sort(descending=True).values, scores)


def test_spike_tables_of_different_columns_do_not_mix():
    """A column that is missing in one is an error, not a guess."""
    bare = top_tokens(TokenBatch(logp=-torch.rand(2, 3), mask=torch.ones(2, 3)))
    with pytest.raises(ValueError, match="columns differ"):
        bare.merge(top_tokens(full_batch()))


def test_micro_batches_that_measure_different_things_keep_the_columns_both_have():
    """In the first one's order, with the rows of both."""
    bare = top_tokens(TokenBatch(logp=torch.full((1, 2), -40.0), mask=torch.ones(1, 2)))
    whole = top_tokens(full_batch())

    for first, second in ((bare, whole), (whole, bare)):
        joined = first.join(second, k=3)
        assert joined.names == ("sequence", "position", "logp")
        assert joined.rows.shape == (3, 4)
        assert (joined.rows[:, 3] == -40.0).sum() == 2
    assert whole.join(whole).names == whole.names


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11"),
        ("_orig_mod.module.model.layers.0.self_attn.q_proj.bias", "model.layers.0"),
        ("base_model.model.model.layers.2.q_proj.lora_A.default.weight", "model.layers.2"),
        ("transformer.h.7.attn.c_attn.weight", "transformer.h.7"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("scale", "scale"),
    ],
)
def test_parameters_are_grouped_by_layer(name, layer):
    """Wrappers and adapters do not change a layer's name."""
    assert layer_of(name) == layer


def test_layer_norms_combine_to_the_global_norm_of_torch():
    """Norms are those of clip_grad_norm_, and the gradients stay untouched."""
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])})
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    before = [p.grad.clone() for p in net.parameters()]

    got = grad_norms(net.named_parameters())

    assert got.layers == ("layers.0", "layers.1", "layers.2")
    assert torch.nn.utils.get_total_norm(before).item() == pytest.approx(got.total.item(), rel=1e-6)
    assert got.norms[1].item() == pytest.approx(torch.cat([b.flatten() for b in before[2:4]]).norm().item(), rel=1e-6)
    assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


def test_a_broken_gradient_names_its_layer():
    """One NaN: one tensor counted, its layer and the total NaN, the others fine."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[1].bias.grad[0] = math.nan

    got = grad_norms(net.named_parameters())

    assert got.nonfinite == 1
    assert got.norms.isnan().tolist() == [False, True]
    assert got.total.isnan()


@pytest.mark.parametrize(("total", "measured"), [(2.0, 1), (math.inf, 0), (math.nan, 0)])
def test_a_loss_scale_is_undone_by_the_norm_the_trainer_reports(total, measured):
    """And an overflow is a skipped step, not a measurement."""
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.full((4,), 1024.0)

    got = grad_norms([("h.0.w", p)]).unscaled_stats(torch.tensor(total))

    assert {name: stat.count.item() for name, stat in got.items()} == {
        "grad_layer/h.0": measured,
        "optim/grad_norm": measured,
        "optim/step_skipped": 1,
    }
    assert got["optim/step_skipped"].value() == 1 - measured
    if measured:
        assert got["grad_layer/h.0"].value() == total


def test_bf16_gradients_are_accumulated_in_float32():
    """A norm rounded to bf16 would be off by up to 0.4 %."""
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.1)

    assert grad_norms([("w", p)]).total.item() == pytest.approx(p.grad.float().norm().item(), rel=1e-6)


def test_without_gradients_there_are_no_norms():
    """None, not 0."""
    assert grad_norms(torch.nn.Linear(2, 2).named_parameters()) is None


def test_a_transfer_gives_back_shapes_values_and_oddities():
    """NaN, infinities and integers arrive as they were."""
    sent = [torch.tensor([[1.0, math.nan], [math.inf, -math.inf]]), torch.tensor(3), torch.tensor(0.5)]
    transfer = Transfer(sent)

    got = transfer.read()

    assert transfer.ready()
    assert [a.shape for a in got] == [(2, 2), (), ()]
    np.testing.assert_array_equal(got[0], sent[0].numpy())
    assert (float(got[1]), float(got[2])) == (3.0, 0.5)
    assert Transfer([]).read() == []


def test_tensors_of_several_devices_meet_on_the_first_that_is_not_the_cpu():
    """A copy to the CPU that nobody waits for would be read half-written."""
    here, there = torch.zeros(2), torch.zeros(2, device="meta")

    assert Transfer([here, there, here]).flat.device.type == "meta"
    assert Transfer([here, here]).flat.device.type == "cpu"
