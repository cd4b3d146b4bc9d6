"""From the loss passes of a step to the report: the right answer, or an honest reason why there is none."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_step import LOSSES, dapo, dapo_kl, plant, policy, rollouts, take_step
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from rlwatch.gradloc import locate as locate_module
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.bisection import follow_larger
from rlwatch.gradloc.direction import Direction, expert_to_blame
from rlwatch.gradloc.locate import LocateOptions, locate
from rlwatch.gradloc.passes import RecordedPasses
from rlwatch.gradloc.report import ExcessFactor, Method


def located(model, batch, loss=dapo, *, options=None, **kwargs):
    taking = {name: kwargs.pop(name) for name in ("micro_batches", "rewards", "autocast") if name in kwargs}
    passes = take_step(model, batch, loss, **taking)
    return locate(model, passes, options=options, **kwargs).report


def places(report, micro_batches=1, rows=8):
    """(row, position) of the culprits, rows counted over the step."""
    first = [int(chunk[0]) for chunk in torch.arange(rows).tensor_split(micro_batches)]
    return {(first[c.at.microbatch] + c.at.row, c.at.position) for c in report.culprits}


@pytest.mark.parametrize("kind", ["ratio", "kl"])
def test_culprits_in_every_micro_batch_are_all_named(kind):
    """One in each of four: the published search follows only the largest micro-batch."""
    model = policy()
    batch = rollouts(model)
    planted, found = batch, []
    for row in range(0, 8, 2):
        only = replace(batch, mask=batch.mask & (torch.arange(8) == row)[:, None])
        advantages = planted.advantages.clone()
        advantages[row] = -1.0
        changed, at = plant(replace(only, advantages=advantages, old=planted.old, ref=planted.ref), kind, 1, math.e**5)
        planted = replace(changed, mask=batch.mask)
        found += at
    report = located(model, planted, dapo_kl, micro_batches=4)

    assert set(found) <= places(report, micro_batches=4)
    assert report.complete
    assert {c.cause for c in report.culprits if c.share > 0.1} == {
        ExcessFactor.KL_TERM if kind == "kl" else ExcessFactor.TOKEN_RATIO
    }


@pytest.mark.parametrize("name", LOSSES)
def test_shares_of_a_complete_report_and_its_layers_add_up(name):
    """Layers to 1; no contribution is larger than the token's own gradient; the norm is the gradient's."""
    model = policy()
    report = located(model, rollouts(model), LOSSES[name], micro_batches=2)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))

    assert report.complete
    assert abs(report.gap) <= 1e-3
    assert report.norm == pytest.approx(norm, rel=1e-6)
    assert sum(report.layers.values()) == pytest.approx(1.0)
    assert all(abs(c.contribution) <= c.own.norm * 1.001 for c in report.culprits)
    assert all(sum(c.own.layers.values()) == pytest.approx(1.0) for c in report.culprits)


@pytest.mark.parametrize("most", [1, 5])
def test_nobody_is_named_who_is_small_beside_the_worst(most):
    """A tenth of its size is the least, however many may be named."""
    model = policy()
    planted, [worst] = plant(rollouts(model), "ratio", 1, math.e**5)

    report = located(model, planted, options=LocateOptions(culprits=most))

    assert places(report) == {worst}


def test_a_step_without_advantages_has_no_gradient_to_localise():
    """All zero: said so, not guessed."""
    model = policy()
    batch = rollouts(model)
    report = located(model, replace(batch, advantages=torch.zeros_like(batch.advantages)))

    assert report.culprits == ()
    assert report.why_not
    assert "zero" in report.why_not


def test_a_step_of_one_token_blames_that_token():
    """It holds all of the norm."""
    model = policy()
    batch = rollouts(model, batch=1, length=6, off=0.0)
    mask = torch.zeros_like(batch.mask)
    mask[0, 3] = True
    report = located(model, replace(batch, mask=mask))

    assert [(c.at.row, c.at.position) for c in report.culprits] == [(0, 3)]
    assert report.culprits[0].share == pytest.approx(1.0, abs=1e-3)
    assert report.culprits[0].own.norm == pytest.approx(report.norm, rel=1e-4)


def test_an_empty_step_says_that_it_is_empty():
    """No token inside the mask."""
    model = policy()
    batch = rollouts(model)
    report = located(model, replace(batch, mask=torch.zeros_like(batch.mask)))

    assert report.tokens == 0
    assert report.why_not


def test_culprits_that_cancel_are_found_by_their_own_gradients():
    """The same response twice, with opposite advantages: neither shows in the norm, both do by the screen."""
    model = policy()
    batch = rollouts(model, off=0.0)
    ids, mask = batch.ids.clone(), batch.mask.clone()
    ids[1], mask[1] = ids[0], mask[0]
    advantages = batch.advantages * 0.05
    advantages[0, 2], advantages[1, 2] = 50.0, -50.0
    twins = replace(batch, ids=ids, mask=mask, advantages=advantages, old=batch.old.clone())
    twins.old[1] = twins.old[0]
    report = located(model, twins)
    shares = {(c.at.row, c.at.position): c for c in report.culprits}

    assert {(0, 2), (1, 2)} <= set(shares)
    assert report.norm < 0.2 * shares[(0, 2)].own.norm
    assert shares[(0, 2)].contribution == pytest.approx(-shares[(1, 2)].contribution, abs=1e-4)


def test_nan_everywhere_is_traced_to_the_weights():
    """Every log-prob is NaN: the first tensor that is not finite is a parameter, not a token."""
    model = policy()
    batch = rollouts(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(math.nan)
    report = located(model, batch)

    assert report.method is Method.TRACE
    assert report.cause is ExcessFactor.NON_FINITE
    assert "layers.0" in report.message
    assert math.isnan(report.norm)


def adapted(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def frozen(model):
    model.model.layers[0].requires_grad_(False)
    return model


MODELS = {
    "fused attention": lambda: policy(attention="sdpa"),
    "tied": lambda: policy(tie=True),
    "untied": lambda: policy(tie=False),
    "frozen part": lambda: frozen(policy()),
    "adapter": lambda: adapted(policy()),
    "dropout": lambda: policy(dropout=0.2),
    "bfloat16": lambda: policy().bfloat16(),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_planted_token_is_the_worst_whatever_the_model(kind):
    """With a gap within tolerance, said in the report."""
    model = MODELS[kind]()
    batch, (place,) = plant(rollouts(model), "ratio", 1, math.e**6)
    report = located(model, batch, micro_batches=2)

    assert place in places(report, micro_batches=2)
    assert places(replace(report, culprits=report.culprits[:1]), micro_batches=2) == {place}
    assert report.complete, report.notes


def test_more_culprits_than_asked_for_are_cut():
    """The largest are kept."""
    model = policy()
    batch, planted = plant(rollouts(model), "ratio", 5, math.e**5)
    report = located(model, batch, options=LocateOptions(culprits=2))

    assert len(report.culprits) == 2
    assert places(report) <= set(planted)


def test_memory_that_does_not_suffice_for_verification_is_said(monkeypatch):
    """Contributions stand; own norms are missing, with the reason."""
    model = policy()
    batch, (place,) = plant(rollouts(model), "ratio", 1, math.e**6)
    passes = take_step(model, batch)
    forward = passes.all[0].forward

    def limited(rows=None):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(rows)

    passes.all[0].forward = limited
    report = locate(model, passes).report

    assert places(report) >= {place}
    assert report.culprits[0].own is None
    assert any("out of memory" in note for note in report.notes)


def test_where_nothing_can_be_differentiated_the_search_is_the_fallback(monkeypatch):
    """Incomplete, by bisection: the tokens are found all the same."""
    from rlwatch.gradloc.report import NotLocalised

    def impossible(*args, **kwargs):
        raise NotLocalised("no method gives finite numbers")

    monkeypatch.setattr(locate_module, "attribute", impossible)
    model = policy()
    batch, (place,) = plant(rollouts(model), "ratio", 1, math.e**6)
    report = located(model, batch)

    assert report.method is Method.BISECTION
    assert not report.complete
    assert places(replace(report, culprits=report.culprits[:1])) == {place}
    assert report.culprits[0].share is None
    assert "no method gives finite numbers" in report.notes


def test_a_forward_that_is_not_the_one_that_was_trained_shows_in_the_gap():
    """It is called incomplete, with the gap, and not believed."""
    model, other = policy(), policy(seed=5)
    passes = take_step(model, rollouts(model))
    passes.all[0].forward = lambda rows=None: take_step(other, rollouts(other)).all[0].forward(rows)
    report = locate(model, passes).report

    assert not report.complete


def test_the_cost_counts_the_search_where_attribution_is_incomplete():
    """A forward and a backward for each of its probes; without it, those of the method and of the verification."""
    model = policy()
    batch = rollouts(model)
    whole = locate(model, take_step(model, batch, micro_batches=2)).report
    passes = take_step(model, batch, micro_batches=2)
    passes.all[0].forward = take_step(policy(seed=5), batch, micro_batches=2).all[0].forward
    half = locate(model, passes, options=LocateOptions(culprits=1)).report
    alone = follow_larger(model, passes, culprits=1, budget=64)

    assert (whole.complete, whole.cost.forwards) == (True, 2)
    assert not half.complete
    assert half.cost.forwards == attribute(model, passes, Direction.of(model)).forwards + alone.probes
    verified = half.cost.backwards - alone.probes
    asked = len(batch.ids)  # one of each response: whether the backward agrees
    assert 1 <= verified - asked <= 7, "two by contribution, two by the screen, one by the search; and a cure or two"


def test_a_layer_that_takes_over_is_blamed_itself():
    """No token stands out, one layer's share is far above its usual: GradLoc's third class."""
    model = policy(layers=3)
    batch = rollouts(model, batch=16)
    usual = located(copy.deepcopy(model), batch).layers
    passes = take_step(model, batch)
    layer = "model.layers.1"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(layer):
                parameter.grad.mul_(40.0)
    scaled = locate(model, passes, usual=usual).report

    assert scaled.layers[layer] > 0.9
    assert not scaled.complete
    assert scaled.cause is ExcessFactor.LAYER
    assert layer in scaled.message


@pytest.mark.parametrize("stacked", [True, False], ids=["one tensor", "modules"])
def test_an_expert_of_a_layer_that_takes_over_is_named(stacked):
    """Experts behind one another in a tensor, as transformers has them, or as modules of their own, as Mixtral had."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (4, 6, 3), "down_proj": (4, 3, 3)}
    gradients = {"model.layers.1.self_attn.q_proj.weight": torch.randn(3, 3, generator=draw)}
    for name, shape in shapes.items():
        every = torch.randn(shape, generator=draw)
        every[2] *= 20.0
        where = "model.layers.1.mlp.experts"
        gradients |= (
            {f"{where}.{name}": every}
            if stacked
            else {f"{where}.{i}.{name}.weight": part for i, part in enumerate(every)}
        )
    gradients["model.layers.0.mlp.experts.0.down_proj.weight"] = 1000 * torch.ones(3, 3)
    number, part = expert_to_blame(gradients, "model.layers.1")

    assert (number, part > 0.9) == (2, True)
    assert expert_to_blame({name: torch.ones_like(g) for name, g in gradients.items()}, "model.layers.1") is None
    assert expert_to_blame(gradients, "model.layers.2") is None


def test_the_report_on_a_layer_says_which_expert_it_was():
    """A mixture of experts of transformers."""
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(config).train()
    batch = rollouts(model, batch=16)
    usual = located(copy.deepcopy(model), batch).layers
    passes = take_step(model, batch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("model.layers.1.mlp.experts."):
                parameter.grad[3].mul_(400.0)

    assert "of that its expert 3;" in locate(model, passes, usual=usual).report.message


def test_a_step_is_localised_from_where_nothing_is_differentiated():
    """An optimizer's hooks run without grad, and that is how they go on afterwards."""
    model = policy()
    passes = take_step(model, rollouts(model), micro_batches=2)
    expected = locate(model, passes).report
    with torch.no_grad():
        found = locate(model, passes).report
        assert not torch.is_grad_enabled()

    assert found.complete
    assert found.culprits == expected.culprits
    assert all(culprit.own is not None for culprit in found.culprits)


def test_a_gradient_that_no_kept_pass_made_is_not_searched():
    """Log-probs were seen, but no backward through them: that is said."""
    model = policy()
    batch = rollouts(model)
    passes = take_step(model, batch)
    passes.all[0].coefficients.clear()
    report = locate(model, passes).report

    assert report.norm > 0
    assert report.why_not == "no backward of the loss was seen after its log-probs were observed"
    assert (report.culprits, report.method, report.cost.forwards) == ((), None, 0)


def test_without_passes_there_is_nothing_to_say():
    """And no exception."""
    model = policy()
    take_step(model, rollouts(model))
    report = locate(model, RecordedPasses()).report

    assert "no loss pass" in report.why_not
