"""Of a step whose gradient is not finite: the first tensor, layer and token that was not, and why."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from tiny_step import LOSSES, Outputs, dapo, dapo_kl, gspo, outputs, policy, rollouts, take_step
from torch import nn

from rlwatch.gradloc.broken import listening
from rlwatch.gradloc.distributed import Alone
from rlwatch.gradloc.locate import locate
from rlwatch.gradloc.nonfinite import shared_trace, trace
from rlwatch.gradloc.passes import RandomState, RecordedPasses
from rlwatch.gradloc.report import MOST_TOKENS, BlameLevel, NonfiniteTrace, Origin, TensorKind, TokenAt

pytestmark = pytest.mark.torch
SMALL = {"batch": 4, "length": 8, "varied": False}


def at(field, row, position, value, **more):
    """A model and a batch in which one token's ``field`` is ``value``."""
    model = policy(**more)
    batch = rollouts(model, **SMALL)
    changed = getattr(batch, field).clone()
    changed[row, position] = value
    return model, replace(batch, **{field: changed})


def broken_gradients(model):
    return [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_advantage_is_named_by_its_token(value):
    """Although nearly every gradient is broken by it."""
    model, batch = at("advantages", 2, 5, value)
    passes = take_step(model, batch, micro_batches=2)

    found = trace(model, passes)

    assert (found.kind, found.name, found.origin) == (TensorKind.INPUT, "advantages", Origin.REWARD)
    assert (found.at, found.token_id) == (TokenAt(0, 1, 0, 5), int(batch.response[2, 5]))
    assert (found.count, found.dtype, found.tokens) == (1, "float32", (TokenAt(0, 1, 0, 5),))
    assert "sequence 2 (micro-batch 1)" in found.message
    assert found.broken["gradients"] == len(broken_gradients(model)) > 10
    assert (found.cost.forwards, found.cost.backwards) == (0, 0)


def test_a_reward_is_named_before_the_advantages_it_broke():
    """The group's advantages are NaN where only one reward was."""
    model, batch = at("advantages", slice(0, 4), slice(None), math.nan)
    rewards = torch.tensor([0.0, 1.0, math.nan, 0.0])
    passes = take_step(model, batch, rewards=rewards)

    found = trace(model, passes)

    assert (found.name, found.origin, found.at) == ("rewards", Origin.REWARD, TokenAt(0, 0, 2, 0))
    assert found.chain == ("rewards", "advantages", "coefficient", "gradients")


@pytest.mark.parametrize(("field", "name", "origin"), [("old", "old_logp", "weights"), ("ref", "ref_logp", "forward")])
def test_a_bad_log_prob_of_another_policy_is_named_by_its_token(field, name, origin):
    """An old one beside a finite reference says that the policy's weights were broken; a reference its own model's."""
    model, batch = at(field, 1, 3, math.nan)
    passes = take_step(model, batch, dapo_kl)

    found = trace(model, passes)

    assert (found.kind, found.name, found.origin.value) == (TensorKind.INPUT, name, origin)
    assert found.tokens == (TokenAt(0, 0, 1, 3),)


def test_an_old_log_prob_without_a_reference_beside_it_gets_its_remedy():
    """The weights are finite now: the pass that gave it is to be looked at."""
    model, batch = at("old", 1, 3, math.nan)
    passes = take_step(model, batch)
    for one in passes.all:
        one.tokens = replace(one.tokens, ref_logp=None)

    found = trace(model, passes)

    assert (found.name, found.origin) == ("old_logp", Origin.FORWARD)
    assert "the rollout's or old policy's pass gave it" in found.message
    assert "compute the old log-probs with the trainer" in found.message


def test_with_ratios_of_sequences_the_coefficients_name_the_row_and_the_inputs_the_token():
    """One old log-prob breaks the coefficients of the whole response."""
    model, batch = at("old", 1, 3, math.nan)
    passes = take_step(model, batch, gspo)

    found = trace(model, passes)

    assert found.broken["coefficient"] == int(batch.mask[1].sum()) == 8
    assert (found.kind, found.name, found.tokens) == (TensorKind.INPUT, "old_logp", (TokenAt(0, 0, 1, 3),))


def test_the_rollout_engine_is_to_blame_where_only_it_gave_nan():
    """Truncated importance sampling multiplies with what the engine said."""
    model = policy()
    batch = rollouts(model, **SMALL)
    rollout = batch.old.clone()
    rollout[3, 2] = math.nan

    def corrected(out, part, total):
        return dapo(out, replace(part, advantages=part.advantages * (part.old - rollout).exp()), total)

    passes = take_step(model, batch, corrected)
    passes.all[0].tokens = replace(passes.all[0].tokens, rollout_logp=rollout)

    found = trace(model, passes)

    assert (found.name, found.origin, found.at) == ("rollout_logp", Origin.ENGINE, TokenAt(0, 0, 3, 2))
    assert found.chain == ("rollout_logp", "coefficient", "gradients")


def test_what_the_loss_does_not_use_is_not_to_blame():
    """NaN in the reference of a loss without KL: gradients are finite, and nothing is found."""
    model, batch = at("ref", 1, 3, math.nan)
    passes = take_step(model, batch, dapo)

    found = trace(model, passes)

    assert (found.kind, found.found, broken_gradients(model)) == (TensorKind.NOTHING, False, [])
    assert found.broken == {"ref_logp": 1}


def test_what_the_loss_does_not_use_is_not_to_blame_for_another_token_of_its_response():
    """NaN of the engine beside an overflow: the coefficient at the engine's NaN is finite."""
    model, batch = at("old", 1, 3, -200.0)
    batch.advantages[1] = -1.0
    passes = take_step(model, batch)
    rollout = batch.old.clamp(min=-5.0)
    rollout[1, 6] = math.nan
    passes.all[0].tokens = replace(passes.all[0].tokens, rollout_logp=rollout)

    found = trace(model, passes)

    assert (found.kind, found.at, found.broken["rollout_logp"]) == (TensorKind.COEFFICIENT, TokenAt(0, 0, 1, 3), 1)


@pytest.mark.parametrize(
    ("field", "loss", "far"), [("old", dapo, "the old policy"), ("ref", dapo_kl, "the reference")], ids=["ratio", "k3"]
)
def test_an_overflow_in_the_loss_is_named_by_its_token_and_how_far_apart_the_policies_are(field, loss, far):
    """exp(200) is no float32: a ratio, or k3 against a reference; all inputs are finite."""
    model, batch = at(field, 1, 3, -200.0 if field == "old" else 200.0)
    batch.advantages[1] = -1.0  # nothing clips
    passes = take_step(model, batch, loss)

    found = trace(model, passes)

    assert (found.kind, found.origin, found.tokens) == (TensorKind.COEFFICIENT, Origin.BACKWARD, (TokenAt(0, 0, 1, 3),))
    assert f"nats from that of {far}" in found.message
    assert "20" in found.message


def test_log_probs_far_from_the_engines_say_that_the_data_are_wrong():
    """Misaligned tokens: old and rollout differ by more than any update."""
    model, batch = at("old", 1, 3, -200.0)
    batch.advantages[1] = -1.0
    passes = take_step(model, batch)
    passes.all[0].tokens = replace(passes.all[0].tokens, rollout_logp=torch.zeros_like(batch.old))

    assert trace(model, passes).origin is Origin.DATA


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_weight_is_named_with_its_layer_and_element(tie):
    """One NaN makes everything NaN: parameters are looked at first."""
    model = policy(tie=tie)
    batch = rollouts(model, **SMALL)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = math.nan
    passes = take_step(model, batch)

    found = trace(model, passes)

    assert (found.kind, found.name) == (TensorKind.PARAMETER, "model.layers.1.mlp.down_proj.weight")
    assert (found.layer, found.index, found.count) == ("model.layers.1", (3, 5), 1)
    assert (found.origin, found.token_id, found.at) == (Origin.WEIGHTS, None, None)
    assert found.chain == ("parameters", "logp", "coefficient", "gradients")


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_row_of_the_embedding_is_named_by_its_token(tie):
    """And by where that token is first read in a response."""
    model = policy(tie=tie)
    batch = rollouts(model, **SMALL)
    token = int(batch.response[2, 4])
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = math.nan
    passes = take_step(model, batch)

    found = trace(model, passes)

    assert (found.name, found.token_id, found.count) == ("model.embed_tokens.weight", token, 32)
    assert batch.response[found.at.row, found.at.position] == token


@pytest.mark.parametrize("name", LOSSES)
def test_nan_everywhere_is_blamed_on_the_weights(name):
    """A model destroyed by an earlier step: nothing of this step is to blame."""
    model = policy(hidden=16)
    batch = rollouts(model, **SMALL)
    gone = torch.full_like(batch.old, math.nan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    passes = take_step(model, replace(batch, old=gone, advantages=gone), LOSSES[name])

    found = trace(model, passes)

    assert (found.kind, found.origin, found.tokens) == (TensorKind.PARAMETER, Origin.WEIGHTS, ())
    assert f"and {len(list(model.parameters())) - 1} more are not finite" in found.message
    assert found.chain == ("parameters", "advantages", "old_logp", "logp", "coefficient", "gradients")


def breaking(module, row, position):
    """Make the output of ``module`` infinite at one place."""
    place = torch.tensor(row), torch.tensor(position)
    return module.register_forward_hook(lambda _, args, output: output.index_put(place, torch.tensor(math.inf)))


def test_a_module_of_finite_weights_whose_output_is_not_finite_is_named():
    """An overflow in the second layer's MLP at one token of the context, seen by one more forward pass."""
    model = policy()
    batch = rollouts(model, **SMALL)
    down = model.model.layers[1].mlp.down_proj
    breaking(down, 1, 9)
    passes = take_step(model, batch, micro_batches=2)
    hooks = dict(down._forward_hooks)

    found = trace(model, passes)

    assert (found.kind, found.name, found.layer) == (
        TensorKind.ACTIVATION,
        "model.layers.1.mlp.down_proj",
        "model.layers.1",
    )
    assert (found.index, found.origin) == ((1, 9), Origin.FORWARD)
    assert (found.at, found.token_id) == (TokenAt(0, 0, 1, 5), int(batch.response[1, 5]))
    assert (found.cost.forwards, found.cost.backwards) == (1, 0)
    assert dict(down._forward_hooks) == hooks


def test_a_place_in_the_prompt_is_no_token_of_the_response():
    """It is in the words, and ``at`` is left out."""
    model = policy()
    batch = rollouts(model, **SMALL)
    breaking(model.model.layers[0].mlp.down_proj, 3, 1)

    found = trace(model, take_step(model, batch))

    assert (found.index, found.at, found.token_id) == ((3, 1), None, None)
    assert "position 1 of the context of sequence 3" in found.message


def test_a_head_that_is_no_module_leaves_the_log_probs_to_be_named():
    """As TRL's, which reads the head's weight alone."""

    def headless(model, ids, prompt, **more):
        out = outputs(model, ids, prompt, **more)
        infinite = torch.zeros_like(out.logp).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.inf))
        return Outputs(out.logp - infinite, out.entropy)

    model = policy()
    batch = rollouts(model, **SMALL)

    found = trace(model, take_step(model, batch, forward=headless))

    assert (found.kind, found.name, found.tokens) == (TensorKind.LOGP, "logp", (TokenAt(0, 0, 1, 2),))
    assert found.origin is Origin.FORWARD


class _InfinityGoingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, place):
        ctx.place = place
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.index_put(ctx.place, torch.tensor(math.inf)), None


class _Fragile(nn.Module):
    """Passes values on; going back, one place is infinite."""

    def __init__(self, inner, row, position):
        super().__init__()
        self.inner, self.place = inner, (torch.tensor(row), torch.tensor(position))

    def forward(self, values):
        return _InfinityGoingBack.apply(self.inner(values), self.place)


def fragile(**more):
    model = policy(**more)
    model.model.layers[0].mlp = _Fragile(model.model.layers[0].mlp, 2, 7)
    return model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_an_infinity_that_arises_only_going_back_is_named_by_module_and_place(checkpointing):
    """Forward all is finite, coefficients too: the gradient of an output is the first that is not."""
    model = fragile()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = rollouts(model, **SMALL)
    passes = take_step(model, batch)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}

    found = trace(model, passes)

    assert (found.kind, found.origin) == (TensorKind.OUTPUT_GRADIENT, Origin.BACKWARD)
    assert (found.name, found.layer) == ("model.layers.0.mlp.inner.down_proj", "model.layers.0")
    assert (found.index, found.at) == ((2, 7), TokenAt(0, 0, 2, 3))
    assert (found.chain, found.broken["gradients"]) == (("gradients",), len(broken_gradients(model)))
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.nan_to_num(7.0), gradients[name].nan_to_num(7.0))


def test_the_graph_is_followed_back_to_where_it_begins():
    """The embedding's own gradient is the last of all."""
    model = policy(tie=False)
    model.model.embed_tokens = _Fragile(model.model.embed_tokens, 1, 5)
    passes = take_step(model, rollouts(model, **SMALL))

    found = trace(model, passes)

    assert (found.kind, found.name) == (TensorKind.OUTPUT_GRADIENT, "model.embed_tokens.inner")
    assert (found.index, found.cost.backwards) == ((1, 5), 1)


def test_the_graph_begins_at_modules_without_parts_whose_inputs_have_no_gradient():
    """All others are on the way to these: their gradients need not be kept."""
    model = policy()
    marked = {}
    with listening(model, lambda name, source, output: marked.update({name: (source, output.requires_grad)})):
        outputs(model, rollouts(model, **SMALL).ids, 4)

    assert [name for name, (source, differentiable) in marked.items() if source and differentiable] == [
        "model.embed_tokens"
    ]
    assert {"", "model", "model.layers.0", "model.layers.0.mlp.up_proj", "lm_head"} <= set(marked)


def test_a_gradient_that_is_finite_when_run_again_did_not_recur():
    """Hardware, a kernel or a race; or an auxiliary loss of one's own. Named at least, and no weights accused."""
    model = policy()
    passes = take_step(model, rollouts(model, **SMALL))
    model.model.norm.weight.grad[3] = math.inf

    found = trace(model, passes)

    assert (found.kind, found.name, found.layer, found.index) == (
        TensorKind.GRADIENT, "model.norm.weight", "model.norm", (3,),
    )  # fmt: skip
    assert found.origin is Origin.CHANCE
    assert "did not recur" in found.message


def test_a_log_prob_that_is_finite_when_run_again_did_not_recur():
    """The head did not overflow: it would again."""
    model = policy()
    batch = rollouts(model, **SMALL)
    once = iter([True])

    def flipped(model, ids, prompt, **more):
        out = outputs(model, ids, prompt, **more)
        if not next(once, False):
            return out
        return Outputs(
            out.logp * torch.ones_like(out.logp).index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan)),
            out.entropy,
        )

    passes = take_step(model, batch, forward=flipped)
    found = trace(model, passes)
    report = locate(model, passes).report

    assert (found.kind, found.origin, found.at) == (TensorKind.LOGP, Origin.CHANCE, TokenAt(0, 0, 1, 2))
    assert report.verdict is BlameLevel.NOT_RECURRED
    assert "did not recur" in report.message
    assert "weights were broken" not in report.message
    assert "nvidia-smi" in report.remedy


def test_a_sum_that_overflows_again_is_no_chance():
    """Each token's gradient is finite, all together are not."""
    model = policy()
    batch = rollouts(model, **SMALL)
    passes = take_step(model, batch)
    for one in passes.all:
        one.coefficients["logp"] = torch.where(batch.mask, 3e37, 0.0)
    for p in model.parameters():
        p.grad.fill_(math.inf)

    assert trace(model, passes).origin is not Origin.CHANCE


def padded(model, *, fill):
    """Two responses end early; their slots after that have token 0, and (``fill``) log-probs that nothing flows from."""
    batch = rollouts(model, **SMALL)
    mask = batch.mask.clone()
    mask[1:3, 5:] = False
    ids = batch.ids.clone()
    ids[:, batch.prompt :][~mask] = 0

    def forward(model, ids, prompt, **more):
        out = outputs(model, ids, prompt, **more)
        return Outputs(out.logp.masked_fill(ids[:, prompt:] == 0, 0.0), out.entropy) if fill else out

    return replace(batch, ids=ids, mask=mask), forward


@pytest.mark.parametrize("fill", [True, False], ids=["stopped by the head", "not stopped"])
def test_nan_in_a_padded_slot_is_distinguished_from_nan_in_a_response(fill):
    """TRL's head stops it: the loss is NaN and the gradients are not. Elsewhere it breaks them."""
    model = policy()
    batch, forward = padded(model, fill=fill)
    batch.old[1, 6] = math.nan
    losses = []

    def loss(out, part, total):
        losses.append(dapo(out, part, total))
        return losses[-1]

    passes = take_step(model, batch, loss, forward=forward)

    found = trace(model, passes)

    assert math.isnan(losses[0].item())
    assert (found.kind, found.name, found.at) == (TensorKind.PADDING, "old_logp", TokenAt(0, 0, 1, 6))
    assert bool(broken_gradients(model)) is not fill
    assert ("gradients are finite" in found.message) is fill
    assert found.broken["old_logp (padding)"] == 1
    assert found.broken["coefficient (padding)"] == 1


def test_a_bad_token_counts_before_a_bad_slot_of_padding():
    """What is inside the mask is looked at first."""
    model = policy()
    batch, forward = padded(model, fill=True)
    batch.old[1, 6] = batch.advantages[3, 0] = math.nan

    found = trace(model, take_step(model, batch, forward=forward))

    assert (found.kind, found.name, found.at) == (TensorKind.INPUT, "advantages", TokenAt(0, 0, 3, 0))


def test_a_buffer_of_nan_is_named_and_one_of_minus_infinity_is_not():
    """Masks hold -inf rightly."""
    model = policy()
    model.register_buffer("causal", torch.full((2, 2), -math.inf))
    batch = rollouts(model, **SMALL)
    passes = take_step(model, batch)

    assert trace(model, passes).kind is TensorKind.NOTHING
    model.model.rotary_emb.inv_freq[0] = math.nan
    found = trace(model, take_step(model, batch))
    assert (found.kind, found.name) == (TensorKind.BUFFER, "model.rotary_emb.inv_freq")


def test_responses_of_token_0_are_counted():
    """What a sampler writes when its logits are NaN."""
    model = policy()
    batch = rollouts(model, **SMALL)
    batch.ids[1, batch.prompt :] = 0
    batch.old[1] = math.nan

    assert trace(model, take_step(model, batch)).id0_frac == 0.25


def test_in_bfloat16_the_type_of_the_tensor_is_said():
    """Half precision is found broken in its own type."""
    model = policy().to(torch.bfloat16)
    batch = rollouts(model, **SMALL)
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf

    assert trace(model, take_step(model, batch)).dtype == "bfloat16"


@pytest.mark.parametrize("make", [fragile, policy], ids=["going back", "weights"])
def test_the_model_is_left_as_it_was(make):
    """Parameters, gradients, buffers, modes, hooks and random numbers, dropout notwithstanding."""
    model = make(dropout=0.2)
    batch = rollouts(model, **SMALL)
    passes = take_step(model, batch)
    model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    random = RandomState.now()

    trace(model, passes)

    assert random.same(RandomState.now())
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in model.modules())


def test_hooks_go_when_the_forward_fails():
    """Half-way through, too."""
    model = fragile()
    passes = take_step(model, rollouts(model, **SMALL))

    def fail(rows=None):
        raise RuntimeError("gone")

    passes.all[0].forward = fail
    with pytest.raises(RuntimeError, match="gone"):
        trace(model, passes)

    assert not any(module._forward_hooks for module in model.modules())


class TwoRanks:
    """This rank, and another that found something (or did not) whenever asked."""

    size, rank = 2, 1

    def __init__(self, other):
        self.other = other

    def max(self, values):
        return values.maximum(torch.tensor(float(self.other)))


def test_where_another_rank_found_it_this_one_says_so_and_runs_nothing():
    """All stop together: no pass is run that the others would have to join."""
    model = fragile()
    passes = take_step(model, rollouts(model, **SMALL))

    found = trace(model, passes, world=TwoRanks(other=True))

    assert (found.kind, found.elsewhere, found.cost.forwards) == (TensorKind.NOTHING, True, 0)
    assert "another rank" in found.message


def test_places_are_of_the_rank():
    """Which one it is, is said of every token."""
    model, batch = at("advantages", 0, 1, math.nan)

    found = trace(model, take_step(model, batch), world=TwoRanks(other=False))

    assert found.at == TokenAt(1, 0, 0, 1)


class Four:
    """Four ranks, of which this is the first; what the others send is given."""

    size, rank = 4, 0

    def __init__(self, *others):
        self.others = [json.dumps(one and asdict(one)).encode() for one in others]

    def gather(self, values):
        if values.dtype == torch.int64:  # the lengths
            return [values, *(torch.tensor([len(one)]) for one in self.others)]
        size = max(len(values), *(len(one) for one in self.others))
        every = [values.numpy().tobytes(), *self.others]
        return [torch.frombuffer(bytearray(one.ljust(size, b"\0")), dtype=torch.uint8) for one in every]


def test_what_one_rank_found_is_known_to_all():
    """The first of them that found something, as it found it; where none did, each keeps its own."""
    model, batch = at("advantages", 2, 5, math.nan)
    found = trace(model, take_step(model, batch))
    finite = trace(policy(), RecordedPasses())

    assert shared_trace(finite, Four(None, found, replace(found, name="later"))) == found
    assert shared_trace(finite, Four(None, None, None)) is finite
    assert shared_trace(finite, Alone()) is finite


def test_a_trace_is_plain_and_bounded():
    """It can be written down: no tensor in it, and never thousands of tokens."""
    model = policy()
    batch = rollouts(model, batch=8, length=24)
    batch.advantages[:] = math.nan

    found = trace(model, take_step(model, batch))

    assert isinstance(found, NonfiniteTrace)
    assert len(found.tokens) == MOST_TOKENS == 64 < found.count
    assert json.loads(json.dumps(asdict(found)))["name"] == "advantages"
    assert "every token of sequence 0" in found.message


@pytest.mark.parametrize(
    ("tokens", "said"), [(1, "at token 0 "), (2, "at every token of sequence 3"), (3, "every token")]
)
def test_a_response_of_few_tokens_is_broken_at_its_token_or_at_all(tokens, said):
    """From two on it is all of them."""
    model = policy()
    batch = rollouts(model)
    batch.mask[3, tokens:] = False
    batch.advantages[3] = math.nan

    found = trace(model, take_step(model, batch))

    assert said in found.message
    assert len(found.tokens) == tokens


def test_a_step_of_nothing_is_finite():
    """No pass was kept."""
    assert trace(policy(), RecordedPasses()).kind is TensorKind.NOTHING
