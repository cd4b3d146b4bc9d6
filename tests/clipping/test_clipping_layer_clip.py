"""LayerClip on real gradients: who is clipped together, by how much, and what is left untouched."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen2Config, Qwen2ForCausalLM
from waits import CountWaits

import rlwatch
from rlwatch.clipping import AdaGC, By, LayerClip, LayerMaxNorm, LayerMedian
from rlwatch.clipping.rules import RULES, module_type_of
from rlwatch.errors import ConfigError

pytestmark = pytest.mark.torch
NEVER = LayerMaxNorm(each=1e30)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "embed": nn.Linear(3, 4),
            "layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]),
            "head": nn.Linear(4, 2),
        }
    )


def forward(model, x):
    hidden = model["embed"](x)
    for layer in model["layers"]:
        hidden = hidden + layer(hidden).tanh()
    return model["head"](hidden)


def backward(model, step=0, spike=None):
    """Gradients of one step; those of layer 1 times ``spike``."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    forward(model, x).square().mean().backward()
    if spike is not None:
        for p in model["layers"][1].parameters():
            p.grad.mul_(spike)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def norm_of(parameters):
    return torch.cat([p.grad.flatten().double() for p in parameters]).norm().item()


def train(clip_of, *, steps=30, spikes=(), optimizer=torch.optim.AdamW):
    model = net()
    clip, opt = clip_of(model), optimizer(model.parameters(), lr=0.001)
    for step in range(steps):
        backward(model, step, 50.0 if step in spikes else None)
        clip()
        opt.step()
    return model, opt, clip


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_only_the_layer_that_spikes_is_scaled():
    """The others keep their gradients bit for bit; it is left with its threshold."""
    model, _, clip = train(lambda model: LayerClip(model, LayerMedian(warmup=8)), steps=20)
    backward(model, 20, spike=50.0)
    before = dict(zip([n for n, _ in model.named_parameters()], gradients(model), strict=True))
    clipped = clip()
    spiked = clipped.groups.index("layers.1")

    assert clipped.layers_clipped == 1
    assert 0.01 < clipped.scale_min < 0.2
    for name, p in model.named_parameters():
        expected = before[name] * clipped.scales[spiked] if name.startswith("layers.1.") else before[name]
        assert torch.equal(p.grad, expected)
    assert clipped.total.item() == pytest.approx(torch.stack([g.norm() for g in before.values()]).norm().item())
    assert clipped.after[spiked].item() == pytest.approx(norm_of(model["layers"][1].parameters()), rel=1e-5)


def test_norms_are_those_of_the_layers():
    """Before and after, against brute force."""
    model = net()
    backward(model)
    expected = [norm_of(m.parameters()) for m in (model["embed"], *model["layers"], model["head"])]
    clipped = LayerClip(model, LayerMaxNorm(each=0.01))()

    assert clipped.groups == ("embed", "layers.0", "layers.1", "layers.2", "head")
    assert clipped.before.tolist() == pytest.approx(expected, rel=1e-6)
    assert [norm_of(m.parameters()) for m in model["layers"]] == pytest.approx(clipped.after[1:4].tolist(), rel=1e-6)
    assert max(clipped.after.tolist()) == pytest.approx(0.01)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_rule_that_never_binds_changes_no_bit_of_training(optimizer):
    """Parameters, moments and random state, against training without."""
    torch.manual_seed(5)
    plain, plain_opt, _ = train(lambda model: lambda: None, optimizer=optimizer)
    random = torch.get_rng_state()
    torch.manual_seed(5)
    clipped, opt, clip = train(lambda model: LayerClip(model, NEVER), optimizer=optimizer)

    assert same(plain, clipped)
    assert torch.equal(random, torch.get_rng_state())
    assert str(plain_opt.state_dict()) == str(opt.state_dict())
    assert clip.counts() == {"steps": 30, "clipped": 0, "nonfinite": 0}


def test_its_global_clip_is_that_of_torch_to_the_last_bit():
    """Where no layer is scaled, in place of clip_grad_norm_."""
    plain, _, _ = train(lambda model: lambda: clip_grad_norm_(model.parameters(), 0.05))
    ours, _, _ = train(lambda model: LayerClip(model, NEVER, max_norm=0.05))

    assert same(plain, ours)


def test_the_global_clip_comes_after_the_layers():
    """What remains of all together has the norm asked for."""
    model = net()
    backward(model, spike=50.0)
    clipped = LayerClip(model, LayerMaxNorm(each=0.02), max_norm=0.01)()

    assert norm_of(model.parameters()) == pytest.approx(0.01, rel=1e-3)
    assert clipped.after.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert clipped.coefficient < 1


@pytest.mark.parametrize("name", RULES)
def test_resumed_training_is_the_training_that_was_never_interrupted(name, tmp_path):
    """Through a file, in the midst of spikes, for every rule."""
    spikes = {18, 19, 25}
    straight, _, clip = train(lambda model: LayerClip(model, name), spikes=spikes)
    model, opt, half = train(lambda model: LayerClip(model, name), steps=20, spikes=spikes)
    torch.save(half.state_dict(), tmp_path / "clip.pt")
    resumed = LayerClip(model, name)
    resumed.load_state_dict(torch.load(tmp_path / "clip.pt", weights_only=True))
    for step in range(20, 30):
        backward(model, step, 50.0 if step in spikes else None)
        resumed()
        opt.step()

    assert same(straight, model)
    assert resumed.counts() == clip.counts()
    for ours, theirs in zip(resumed.state_dict()["state"].values(), clip.state_dict()["state"].values(), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_a_forgotten_state_would_show():
    """What the test above can tell."""
    _, _, clip = train(lambda model: LayerClip(model, LayerMedian(warmup=8)), spikes={25})
    model, opt, _ = train(lambda model: LayerClip(model, LayerMedian(warmup=8)), steps=20)
    anew = LayerClip(model, LayerMedian(warmup=8))
    for step in range(20, 30):
        backward(model, step, 50.0 if step == 25 else None)
        anew()
        opt.step()

    assert clip.counts()["clipped"] == 1
    assert anew.counts()["clipped"] == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: LayerClip(net(), "adagc"), "another rule"),
        (lambda: LayerClip(net(), by="tensor"), "another by"),
        (lambda: LayerClip(net()["layers"]), "another groups"),
        (lambda: LayerClip(net(), LayerMedian(window=32)), "other sizes"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(other, said):
    """Which part does not fit is said."""
    _, _, clip = train(LayerClip, steps=3)
    before = clip.state_dict()
    with pytest.raises(ConfigError, match=said):
        clip.load_state_dict(other().state_dict())

    assert str(clip.state_dict()) == str(before)


def test_a_layer_with_nan_is_left_to_the_guard_of_the_loop_and_counted():
    """No gradient is touched, and the rule forgets the step: the next ones are as if it had not been."""
    model, _, clip = train(lambda model: LayerClip(model, LayerMedian(warmup=4), max_norm=0.01), steps=10)
    state = clip.state_dict()["state"]
    backward(model, 11, spike=50.0)
    model["head"].bias.grad[0] = float("nan")
    before = gradients(model)
    clipped = clip()

    for ours, theirs in zip(gradients(model), before, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert clip.counts()["nonfinite"] == 1
    assert (clipped.nonfinite, clipped.layers_clipped, clipped.scale_min) == (1, 0, 1)
    assert clipped.total.isnan()
    assert str(clip.state_dict()["state"]) == str(state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_layer_can_be_set_to_zero(bad):
    """The others go on, clipped as ever, and the global clip sees what is left."""
    model, _, clip = train(
        lambda model: LayerClip(model, LayerMedian(warmup=4), nonfinite="zero", max_norm=1), steps=10
    )
    backward(model, 11, spike=50.0)
    model["head"].bias.grad[0] = bad
    clipped = clip()

    assert all((p.grad == 0).all() for p in model["head"].parameters())
    assert clipped.scales[clipped.groups.index("layers.1")] < 0.2
    assert torch.stack(gradients(model)[:1]).isfinite().all()
    assert clipped.after.isfinite().all()
    assert norm_of(model.parameters()) == pytest.approx(clipped.after.norm().item(), rel=1e-4)


def test_without_any_gradient_nothing_happens():
    """Nor with gradients that are all zero: the state stays empty, and the next step is judged as the first."""
    model = net()
    clip = LayerClip(model, max_norm=1.0)
    assert clip().total == 0
    backward(model)
    model.zero_grad(set_to_none=False)
    clipped = clip()

    assert clipped.total == 0
    assert clip.state_dict()["state"]["at"].tolist() == [0] * 5
    assert all((g == 0).all() for g in gradients(model))


def test_gradients_of_a_frozen_part_and_of_an_expert_without_a_token_are_no_zeros_to_learn_from():
    """Layer 2 has no gradient for 30 steps; when it has one it is in its warm-up, not a spike above zero."""
    model = net()
    clip = LayerClip(model, LayerMedian(warmup=4))
    for step in range(30):
        backward(model, step)
        for p in model["layers"][2].parameters():
            p.grad = None if step % 2 else torch.zeros_like(p)
        clip()
    backward(model, 31)

    assert clip().layers_clipped == 0


def qwen(**kwargs):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, **kwargs,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def language_step(model):
    ids = torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()


def test_tied_weights_count_once():
    """Embedding and head of a Qwen2 are one tensor, in one group."""
    model = qwen()
    language_step(model)
    clipped = LayerClip(model, NEVER)()

    assert clipped.groups == ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")
    assert clipped.before.norm().item() == pytest.approx(norm_of(model.parameters()), rel=1e-5)


def test_adapters_go_with_their_layer():
    """LoRA on a Qwen2: four adapter tensors of each layer in its group; the frozen rest has norm 0."""
    model = get_peft_model(qwen(), LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    language_step(model)
    clipped = LayerClip(model, NEVER)()
    held = dict(zip(clipped.groups, clipped.before.tolist(), strict=True))
    adapters = [p for n, p in model.named_parameters() if "layers.0" in n and p.requires_grad]

    assert len(adapters) == 4
    assert held["model.layers.0"] == pytest.approx(norm_of(adapters), rel=1e-5)
    assert held["model.embed_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("module.model.layers.3.self_attn.q_proj.weight", "q_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight", "up_proj"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head"),
        ("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight", "up_proj"),
        ("layers.0.weight", "layers"),
        ("weight", "weight"),
    ],
)
def test_kinds_of_modules(name, kind):
    """Adapters with the module they adapt."""
    assert module_type_of(name) == kind


@pytest.mark.parametrize(("by", "groups"), [(By.TENSOR, 10), (By.LAYER, 5), (By.MODULE, 3), (By.ALL, 1)])
def test_what_is_clipped_together_can_be_chosen(by, groups):
    """And the squares of the groups always add up to the whole."""
    model = net()
    backward(model)
    clipped = LayerClip(model, NEVER, by=by)()

    assert len(clipped.groups) == groups
    assert clipped.before.norm().item() == pytest.approx(clipped.total.item(), rel=1e-6)


def test_half_precision_gradients_are_measured_in_single_precision():
    """1024 x 1024 entries of 0.01: a sum in bfloat16 would stand still."""
    model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    model.weight.grad = torch.full_like(model.weight, 0.01)
    clipped = LayerClip(model, LayerMaxNorm(each=1.0))()

    assert clipped.total.item() == pytest.approx(1024 * float(torch.tensor(0.01).bfloat16()), rel=1e-3)
    assert clipped.total.dtype == torch.float32
    assert model.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", RULES)
def test_nothing_waits_for_the_device_and_nothing_is_drawn(name):
    """Neither in a healthy step nor in one that is clipped."""
    model, _, clip = train(lambda model: LayerClip(model, name, max_norm=0.1), steps=3)
    for spike in (None, 50.0):
        backward(model, 4, spike)
        with CountWaits() as waits:
            clip()
        assert waits.seen == []


def test_parameters_that_changed_are_not_clipped_in_silence():
    """An adapter that was added after LayerClip was made."""
    model = net()
    clip = LayerClip(model)
    model["adapter"] = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="other parameters"):
        clip()


def test_wrapped_and_compiled_models_have_the_groups_of_the_bare_one():
    """So that a state fits whatever the model is wrapped in."""
    bare = LayerClip(net())
    wrapped = nn.ModuleDict({"module": net()})

    assert LayerClip(wrapped).groups == bare.groups
    assert LayerClip(nn.ModuleDict({"_orig_mod": net()})).groups == bare.groups
    bare.model = wrapped
    assert bare().total == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rule": "nope"}, "unknown rule"),
        ({"by": "block"}, "by must be one of layer, tensor, module, all, got 'block'"),
        ({"max_norm": 0}, "max_norm must be"),
        ({"nonfinite": "drop"}, "nonfinite must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    """With the value that was passed."""
    with pytest.raises(ConfigError, match=said):
        LayerClip(net(), **arguments)


def test_weights_in_one_flat_piece_are_refused():
    """FSDP1 marks them so."""
    model = net()
    model["head"].weight._is_flat_param = True
    with pytest.raises(ConfigError, match="FSDP1"):
        LayerClip(model)


def test_a_model_without_parameters_is_refused():
    """There is nothing to clip."""
    with pytest.raises(ConfigError, match="no parameters"):
        LayerClip(nn.Tanh())


def test_it_is_one_import_away_and_a_copy_is_independent():
    """rlwatch.LayerClip; a rule without a grouping of its own is taken by layer."""

    class Bare:
        def start(self, like):
            return {}

        def scales(self, norms, seen, state):
            return norms * 0 + 0.5, state

    model = net()
    backward(model)
    before = gradients(model)
    rlwatch.LayerClip(model, Bare())()

    assert all(torch.equal(g, 0.5 * b) for g, b in zip(gradients(model), before, strict=True))
    assert copy.deepcopy(AdaGC()) == AdaGC()


def test_a_watcher_records_what_was_clipped():
    """clip().metrics() goes to watcher.step as it is."""
    model = net()
    clip = LayerClip(model, LayerMaxNorm(each=0.01))
    with rlwatch.Watcher(model, store="memory://layer-clip") as watcher:
        backward(model)
        watcher.step(1, **clip().metrics())
        watcher.finish()

    metrics = {}
    for record in rlwatch.open_store("memory://layer-clip").records(watcher.run.info.run_id):
        metrics |= record.metrics
    assert metrics["optim/layers_clipped"] == 5
    assert 0 < metrics["optim/clip_scale_min"] < 1
    assert metrics["optim/grad_norm"] == pytest.approx(clip.last.total.item())
