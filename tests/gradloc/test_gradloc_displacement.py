"""Forward passes see weights moved along a direction, of every kind of model; the weights are never written."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_step import dapo, outputs, policy, rollouts, take_step
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from rlwatch.gradloc import attribution
from rlwatch.gradloc import direction as directions
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.direction import Direction, displaced
from rlwatch.gradloc.passes import Outputs
from rlwatch.gradloc.report import Method
from rlwatch.gradloc.rerun import Precision

FD, JVP = Method.FD, Method.JVP


def gap(model, passes, method=FD):
    """Of the gradient that ``model`` holds."""
    return attribute(model, passes, Direction.of(model), methods=[method]).gap


def stepped(model, **step):
    """The passes of a step of ``model``."""
    return take_step(model, rollouts(model), **step)


def test_what_is_seen_is_theta_plus_a_step_along_the_unit_gradient():
    """As if the weights had been written, for a model whose weights are tied."""
    model = policy()
    one = stepped(model).all[0]
    direction = Direction.of(model)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            p.add_(direction.gradients[name], alpha=0.3 / direction.norm)
        expected = outputs(moved, rollouts(model).ids, 4).logp
        with displaced(model, direction, 0.3, Precision()):
            found = one.forward().logp

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, one.tokens.logp, atol=1e-3)
    assert torch.equal(one.forward().logp, one.tokens.logp)


def test_no_weight_is_written():
    """Not even to be written back: their version counters stand still, and they are the same objects."""
    model = policy()
    passes = stepped(model)
    before = [(name, id(p), p._version) for name, p in model.named_parameters()]
    gap(model, passes)
    gap(model, passes, JVP)

    assert [(name, id(p), p._version) for name, p in model.named_parameters()] == before
    assert all(type(module._parameters) is dict for module in model.modules())


def test_a_head_that_is_read_without_its_module_is_moved_too():
    """TRL multiplies with ``lm_head.weight`` itself."""

    def fused(model, ids, prompt):
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1]
        every = (hidden @ model.lm_head.weight.t()).float().log_softmax(-1)
        return Outputs(every.gather(-1, ids[:, prompt:, None])[..., 0], -(every.exp() * every).sum(-1))

    for tie in (True, False):
        model = policy(tie=tie)
        passes = stepped(model, forward=fused)
        assert abs(gap(model, passes, JVP)) < 1e-6
        assert abs(gap(model, passes)) < 1e-3


@pytest.mark.parametrize("method", [FD, JVP])
def test_a_pad_token_in_the_context_of_a_tied_embedding(method, monkeypatch):
    """Autograd drops that row's gradient as an input and keeps it as an output: so must the displacement."""
    model = policy()
    nn.init.normal_(model.model.embed_tokens.weight, std=0.06)  # the pad token's row too: training moves it
    batch = rollouts(model)
    batch.ids[:, ::3] = model.config.pad_token_id
    passes = take_step(model, batch)
    right = gap(model, passes, method)
    monkeypatch.setattr(directions, "_without", lambda gradient, row: gradient)

    assert abs(right) < 2e-4
    assert abs(gap(model, passes, method)) > 1e-3


def test_a_pad_token_of_an_untied_embedding_needs_no_care():
    """Its row has no gradient at all."""
    model = policy(std=0.2, tie=False)
    batch = rollouts(model)
    batch.ids[:, ::3] = model.config.pad_token_id

    assert abs(gap(model, take_step(model, batch), JVP)) < 1e-6


def lora(dtype=torch.float32):
    """A policy with adapters, as TRL makes it; the adapters' second halves are not zero."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(policy().to(dtype), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def test_adapters():
    """Only they have gradients, and the identity is theirs."""
    model = lora()
    passes = stepped(model, micro_batches=2)

    assert all("lora" in name for name in Direction.of(model).gradients)
    assert abs(gap(model, passes, JVP)) < 1e-6
    assert abs(gap(model, passes)) < 1e-3


def test_adapters_of_a_half_precision_model():
    """The frozen weights are seen in float32 too."""
    model = lora(torch.bfloat16)

    assert abs(gap(model, stepped(model))) < 1e-2


def test_frozen_parts():
    """They have no part in the direction."""
    model = policy(tie=False)
    model.model.embed_tokens.requires_grad_(requires_grad=False)
    model.model.layers[0].requires_grad_(requires_grad=False)
    passes = stepped(model)

    assert abs(gap(model, passes, JVP)) < 1e-6
    assert abs(gap(model, passes)) < 1e-3


def test_dropout_falls_as_it_did():
    """Each micro-batch runs from its own random state."""
    model = policy(dropout=0.3)
    passes = stepped(model, micro_batches=3)

    assert abs(gap(model, passes, JVP)) < 1e-6
    assert abs(gap(model, passes)) < 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """Nothing is to be recomputed: there is no backward."""
    model = policy()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    passes = stepped(model)

    assert abs(gap(model, passes)) < 1e-3
    if not reentrant:
        assert abs(gap(model, passes, JVP)) < 1e-6


def test_fused_attention():
    """It has no forward derivative: plain products stand in for it."""
    model = policy(attention="sdpa")
    passes = stepped(model)

    assert abs(gap(model, passes, JVP)) < 1e-6
    assert abs(gap(model, passes)) < 1e-3
    assert model.config._attn_implementation == "sdpa"


def test_a_compiled_model():
    """Compiled code reads weights past the displacement; for the while it is not compiled."""
    model = policy(layers=1)
    compiled = torch.compile(model, backend="eager")
    passes = stepped(compiled)

    assert abs(gap(compiled, passes)) < 1e-3
    assert abs(gap(model, passes)) < 1e-3


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_seen_in_float32(low):
    """A step along the gradient is less than their last bit."""
    model = policy().to(low)
    passes = stepped(model)
    seen = Precision()
    with torch.no_grad(), displaced(model, Direction.of(model), 1e-3, seen):
        assert passes.all[0].forward().logp.dtype == torch.float32
        assert model.lm_head.weight.dtype == torch.float32

    assert seen.low
    assert abs(gap(model, passes)) < 1e-2


def test_a_cast_in_the_forward_pass_loses_no_difference():
    """TRL keeps a tied head in float32 and casts what the embedding gives; a step would be rounded away there."""
    model = policy().bfloat16()
    model.lm_head.float()
    model.model.embed_tokens.weight = model.lm_head.weight
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out.to(torch.bfloat16))

    def cast(model, ids, prompt):
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt - 1 : -1].float()
        every = (hidden @ model.lm_head.weight.t()).log_softmax(-1)
        return Outputs(every.gather(-1, ids[:, prompt:, None])[..., 0], -(every.exp() * every).sum(-1))

    batch = rollouts(policy())

    assert abs(gap(model, take_step(model, batch, forward=cast))) < 1e-2


def mixture(kind):
    """A mixture of four experts, two for each token."""
    torch.manual_seed(0)
    size = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.06,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **size)).train()
    small = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts=4, **small, **size)).train()


def balanced(model, ids, prompt):
    """With the router's balance."""
    result = model(input_ids=ids, output_router_logits=True)
    every = result.logits[:, prompt - 1 : -1].float().log_softmax(-1)
    return Outputs(every.gather(-1, ids[:, prompt:, None])[..., 0], -(every.exp() * every).sum(-1), result.aux_loss)


def with_balance(out, batch, total):
    """The router's balance is a large part of it."""
    return dapo(out, batch, total) + 0.5 * out.aux


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral"])
def test_a_mixture_of_experts(kind, monkeypatch):
    """Exact with the auxiliary loss; differences only where no token changes its expert."""
    model = mixture(kind)
    passes = stepped(model, loss=with_balance, forward=balanced, micro_batches=2)
    direction = Direction.of(model)
    exact = attribute(model, passes, direction, methods=[JVP])
    held = attribute(model, passes, direction, methods=[FD])
    monkeypatch.setattr(attribution, "routed", lambda model: False)

    assert abs(exact.gap) < 1e-6
    assert abs(exact.aux) > 0.1 * direction.norm
    assert held.forwards == 3
    assert held.complete
    largest = max(float(c.abs().max()) for c in exact.contributions)
    for found, expected in zip(held.contributions, exact.contributions, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-3 * largest)
    assert not attribute(model, passes, direction, methods=[FD]).complete


def test_an_auxiliary_loss_counts_only_with_its_coefficient():
    """Without it the contributions miss the norm."""
    model = mixture("mixtral")
    passes = stepped(model, loss=with_balance, forward=balanced)
    del passes.all[0].coefficients["aux"]

    assert abs(gap(model, passes, JVP)) > 0.1


class Normed(nn.Module):
    """Embedding, batch norm with running statistics, head: its buffers change in every forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        hidden = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(hidden).log_softmax(-1).gather(-1, ids.roll(1, 1)[..., None])[..., 0]


def test_running_statistics():
    """A pass depends on its batch only, and leaves them as they were."""
    model = Normed()
    ids = torch.arange(24).reshape(2, 12) % 16
    template = stepped(policy()).all[0]
    passes = stepped(policy())
    passes.clear()
    out = Outputs(model(ids))
    passes.add(lambda rows=None: Outputs(model(ids)), out, template.tokens, random=template.random)
    (out.logp * torch.randn(2, 12)).sum().backward()
    passes.all[0].tokens = type(template.tokens)(out.logp.detach(), torch.ones(2, 12))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    assert abs(gap(model, passes, JVP)) < 1e-6
    assert abs(gap(model, passes)) < 1e-3
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
