"""Gradients that Megatron cuts over ranks, each rank played in turn; real ranks: ``tests/nightly/test_megatron_loop.py``."""

import sys
import types

import pytest
import torch
from torch import nn

from rlwatch.clipping import LayerClip
from rlwatch.errors import ConfigError, RLWatchError
from rlwatch.integrations.checkpoints import ReferenceFacts, WriteDown
from rlwatch.integrations.reference import Anchored
from rlwatch.integrations.torch import Watcher
from rlwatch.tensors import megatron
from rlwatch.tensors.gradnorm import grad_norms
from rlwatch.tensors.mergeable import merge_ranks

pytestmark = pytest.mark.torch

PLACES = (
    "tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel", "expert_tensor_parallel",
    "expert_model_parallel", "expert_data_parallel",
)  # fmt: skip


@pytest.fixture
def placed(monkeypatch):
    """Megatron's groups, as seen by a rank: ``placed(tensor_model_parallel=(2, 1))`` is the second of two."""

    def place(**places):
        state = types.ModuleType("megatron.core.parallel_state")
        state.model_parallel_is_initialized = lambda: True
        for name in PLACES:
            size, rank = places.get(name, (1, 0))
            setattr(state, f"get_{name}_world_size", lambda size=size, **_: size)
            setattr(state, f"get_{name}_rank", lambda rank=rank, **_: rank)
        monkeypatch.setitem(sys.modules, state.__name__, state)

    return place


def net():
    """Eight outputs, of which a rank may have four."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(4, 8)]), "norm": nn.LayerNorm(4), "experts": nn.Linear(4, 4)}
    )
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def part(whole, rank, ranks=2):
    """What tensor parallelism leaves a rank: rows of the matrix, all of the norm."""
    model = net()
    linear = model["layers"][0]
    for name, _ in list(linear.named_parameters()):
        grad = whole["layers"][0].get_parameter(name).grad.chunk(ranks)[rank]
        setattr(linear, name, nn.Parameter(torch.zeros_like(grad)))
        linear.get_parameter(name).grad = grad.clone()
        linear.get_parameter(name).tensor_model_parallel = True
    return model


def numbers(stats):
    return {name: stat.value().item() for name, stat in stats.items() if stat.count > 0}


def together(*norms):
    stats = {}
    for one in norms:
        stats = merge_ranks(stats, one.stats())
    return numbers(stats)


def test_pieces_add_up_and_copies_count_once(placed):
    """Of four ranks, two of which have each half."""
    whole, seen = net(), []
    for data in range(2):
        for tensor in range(2):
            placed(tensor_model_parallel=(2, tensor), data_parallel=(2, data))
            seen.append(megatron.model_norms(part(whole, tensor), rank=2 * data + tensor))

    assert [one is None for one in seen] == [False, False, True, True], "copies have nothing to say"
    assert numbers(seen[0].stats()).keys() == {"grad_layer/norm", "grad_layer/experts"}, "a part is no norm"
    assert together(*seen[:2]) == pytest.approx(numbers(grad_norms(whole.named_parameters()).stats()), rel=1e-6)


def test_experts_of_one_name_are_as_many_as_there_are_ranks(placed):
    """Their squares add up, and each that is broken counts."""
    seen, squares = [], 0.0
    for rank in range(2):
        placed(expert_model_parallel=(2, rank), data_parallel=(2, rank))
        model = net()
        for p in model["experts"].parameters():
            p.allreduce = False
            p.grad = torch.full_like(p, float(rank + 1))
            squares += float(p.grad.square().sum())
        seen.append(model)
    placed(expert_model_parallel=(2, 0), data_parallel=(2, 0))
    first = megatron.model_norms(seen[0], rank=0)
    seen[1]["experts"].weight.grad[0] = torch.nan
    seen[0]["experts"].weight.grad[0] = torch.nan
    broken = [megatron.model_norms(seen[0], rank=0)]
    placed(expert_model_parallel=(2, 1), data_parallel=(2, 1))
    broken.append(megatron.model_norms(seen[1], rank=1))
    seen[1]["experts"].weight.grad[0] = 2.0
    second = megatron.model_norms(seen[1], rank=1)

    assert together(first, second)["grad_layer/experts"] == pytest.approx(squares**0.5)
    assert together(*broken)["nonfinite/grad"] == 2


def test_a_shared_copy_counts_where_it_is_whole_alone(placed):
    """Megatron marks the copy of tied embeddings."""
    placed(tensor_model_parallel=(2, 0))
    model = part(net(), 0)
    model["experts"].weight.shared = True
    model["experts"].bias.shared = True

    assert "grad_layer/experts" not in megatron.model_norms(model).stats()


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"pipeline_model_parallel": (2, 0)}, "stages of a pipeline"),
        ({"tensor_model_parallel": (2, 0), "expert_tensor_parallel": (1, 0)}, "experts are cut over other ranks"),
    ],
)
def test_what_marks_do_not_tell_is_refused(placed, places, said):
    """No number rather than a wrong one."""
    placed(**places)
    model = nn.ModuleDict({"mlp": part(net(), 0)})

    assert said in megatron.hindrance(model)
    assert megatron.model_norms(model) is None


def test_float16_is_refused_for_its_scale(placed):
    """Which Megatron's optimizer takes out later."""
    placed(tensor_model_parallel=(2, 0), expert_tensor_parallel=(2, 0))

    assert "loss scale" in megatron.hindrance(part(net(), 0).half())


def test_marks_without_groups_are_refused_where_there_are_ranks(monkeypatch):
    """DeepSpeed's AutoTP leaves the same mark; alone the mark means nothing."""
    model = part(net(), 0)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", None)
    assert megatron.hindrance(model) is None

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "are missing" in megatron.hindrance(model)
    assert megatron.hindrance(net()) is None


def test_buffers_the_model_does_not_know_are_refused(placed):
    """The module inside Megatron's DDP."""
    placed()
    model = net()
    model["norm"].weight.main_grad = torch.zeros(4)

    assert "a DDP around it" in megatron.hindrance(model)


@pytest.mark.parametrize(
    ("places", "tells"),
    [
        ({}, True),
        ({"tensor_model_parallel": (2, 1)}, False),
        ({"context_parallel": (2, 1)}, False),
        ({"pipeline_model_parallel": (2, 0)}, False),
        ({"pipeline_model_parallel": (2, 1)}, True),
        ({"data_parallel": (2, 1)}, True),
    ],
)
def test_of_ranks_that_see_the_same_responses_one_tells(placed, places, tells):
    """Tokens and rewards count once."""
    placed(**places)
    with Watcher(store="memory://copies", sigterm=False) as watcher:
        watcher.rollouts(rewards=[0.0, 1.0])
        watcher.observe(logp=torch.tensor([[-1.0]]), mask=torch.ones(1, 1))
        watcher.step(1)

    assert ("policy/logp_mean" in watcher.latest, "reward/mean" in watcher.latest) == (tells, tells)


def test_the_watcher_says_what_to_do_instead(placed):
    """Once, and in ``unavailable``; the norm that the loop knows is recorded. At a first try it is an error."""
    placed(pipeline_model_parallel=(2, 1))
    with Watcher(part(net(), 0), store="memory://stages", sigterm=False) as watcher:
        watcher.gradients()
        watcher.step(1, loss=0.5)
        assert watcher.unavailable["optim/grad_norm"].startswith("gradients() was refused: stages of a pipeline")
        watcher.gradients()
        watcher.step(2, grad_norm=3.0)
        assert "optim/grad_norm" not in watcher.unavailable
    with (
        Watcher(part(net(), 0), store="memory://strict", sigterm=False, strict=True) as strict,
        pytest.raises(ConfigError, match=r"gradients\(\): stages of a pipeline .* step\(grad_norm=\)"),
    ):
        strict.gradients()


def test_what_reads_plain_gradients_is_refused_at_set_up(placed):
    """Localisation and layer-wise clipping; by default spikes are just not localised."""
    placed(tensor_model_parallel=(2, 0), expert_tensor_parallel=(2, 0))
    model = part(net(), 0)

    with pytest.raises(ConfigError, match="localise: Megatron"):
        Watcher(model, localise=True, store="memory://localise")
    with pytest.raises(ConfigError, match="Megatron cuts the model"):
        LayerClip(model)
    with Watcher(model, store="memory://default", sigterm=False) as watcher:
        assert not watcher.collector.localises


def test_a_reference_that_is_cut_is_copied_but_not_kept_in_one_file(placed, tmp_path):
    """Rank 0 would write its part as if it were all."""
    placed(tensor_model_parallel=(2, 0), expert_tensor_parallel=(2, 0))
    policy, reference = part(net(), 0), part(net(), 1)
    anchored = Anchored(policy, reference)
    kept = WriteDown(lambda: anchored, lambda: True)

    anchored.check()
    assert len(anchored.pairs()) == 6
    with pytest.raises(RLWatchError, match="does not gather"):
        kept.check(kept.command(tmp_path, ReferenceFacts(1)))
