"""Norms of gradients and changes of weights that lie in shards: whole once the ranks are together, absent before."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlwatch.tensors.gradnorm import Marked, Norm, grad_norms
from rlwatch.tensors.mergeable import merge, merge_ranks
from rlwatch.tensors.weight_gap import UpdateSample

pytestmark = pytest.mark.torch


def values(stats):
    return {name: stat.value().item() for name, stat in stats.items() if stat.count > 0}


def test_a_norm_is_known_once_its_shards_are_together():
    """Not before: the norm of a shard is not the norm of the layer."""
    one, two = (Norm.of(torch.tensor(v), held=n, size=3) for v, n in ((9.0, 1), (16.0, 2)))

    assert one.count == two.count == 0
    assert one.across(two).count == 1
    assert one.across(two).value() == 5.0


def test_what_every_rank_holds_whole_is_counted_once():
    """Data-parallel copies do not add up."""
    whole = Norm.of(torch.tensor(9.0), held=3, size=3)

    assert whole.across(whole).value() == 3.0


def test_a_later_measurement_of_the_same_rank_replaces_the_earlier():
    """Gradients are read once a step."""
    old, new = (Norm.of(torch.tensor(v), held=1, size=1) for v in (4.0, 9.0))

    assert merge({"n": old}, {"n": new})["n"].value() == 3.0


def test_a_tensor_broken_in_two_shards_is_one_broken_tensor():
    """As one process would count it."""
    one = Marked.of(torch.tensor([1.0, 0.0, 1.0]), held=1, size=2)
    two = Marked.of(torch.tensor([1.0, 0.0, 0.0]), held=1, size=2)

    assert one.across(two).value() == 2
    assert one.across(Marked.of(torch.tensor([1.0]), held=1, size=2)).value() == 2  # another model: not comparable


def net():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])})
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def test_another_data_parallel_rank_has_nothing_to_add():
    """Its gradients are rank 0's; not even their norms are computed."""
    assert grad_norms(net().named_parameters(), rank=1) is None


def test_flattened_parameters_of_fsdp1_are_not_measured():
    """Their gradient is a shard that does not say of what, so that neither layer nor whole has a norm."""
    model = net()
    model["layers"][1].weight._fsdp_flattened = True

    got = values(grad_norms(model.named_parameters()).stats())

    assert got.keys() == {"grad_layer/layers.0"}


def test_the_statistics_of_whole_gradients_are_those_of_torch():
    """Layers, total and the number of broken tensors."""
    model = net()
    grads = [p.grad for p in model.parameters()]
    got = values(grad_norms(model.named_parameters()).stats())

    assert got["optim/grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(grads).item(), rel=1e-6)
    assert got["grad_layer/layers.1"] == pytest.approx(torch.nn.utils.get_total_norm(grads[2:]).item(), rel=1e-6)
    assert got["nonfinite/grad"] == 0


@contextmanager
def one_of_four(rank, shape, names):
    """The mesh as ``rank`` sees it, in a process group that sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def part_of(tensor, mesh, placements):
    """The DTensor of ``tensor`` on this rank, cut as ``torch.chunk`` cuts: the last ranks may get nothing."""
    local = tensor
    for placement, at, ranks in zip(placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if isinstance(placement, Shard):
            pieces = local.chunk(ranks, placement.dim)
            empty = pieces[0].narrow(placement.dim, 0, 0)
            local = pieces[at] if at < len(pieces) else empty
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def gradients():
    torch.manual_seed(0)
    return {"layers.0.w": torch.randn(6, 4), "layers.0.b": torch.randn(3), "layers.1.w": torch.randn(5, 2)}


def norms_of(rank, shape, names, placements, grads):
    """What ``rank`` measures of ``grads``, which lie as ``placements`` say; whole where they say nothing."""
    with one_of_four(rank, shape, names) as mesh:
        parameters = []
        for name, grad in grads.items():
            spec = placements.get(name)
            p = torch.nn.Parameter(grad if spec is None else part_of(grad, mesh, spec))
            p.grad = grad.clone() if spec is None else part_of(grad, mesh, spec)
            parameters.append((name, p))
        found = grad_norms(parameters, rank=rank)
        return {} if found is None else found.stats()


ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()
LAYOUTS = {
    "fully sharded, unevenly": ((4,), ("shard",), dict.fromkeys(gradients(), (ROWS,))),
    "one parameter whole": ((4,), ("shard",), {"layers.0.w": (ROWS,), "layers.1.w": (ROWS,)}),
    "two copies of the shards": ((2, 2), ("copy", "shard"), dict.fromkeys(gradients(), (COPY, ROWS))),
    "sharded over data and tensor": (
        (2, 2),
        ("data", "tensor"),
        {"layers.0.w": (ROWS, COLUMNS), "layers.0.b": (ROWS, COPY), "layers.1.w": (COLUMNS, ROWS)},
    ),
    "all whole": ((4,), ("data",), {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shards_of_four_ranks_add_up_to_what_one_process_measures(layout):
    """Every element counts once, wherever its copies are."""
    grads = gradients()
    grads["layers.1.w"][4, 1] = 100.0
    stats = {}
    for rank in range(4):
        stats = merge_ranks(stats, norms_of(rank, *LAYOUTS[layout], grads))

    everything = torch.cat([grad.flatten() for grad in grads.values()])
    assert values(stats) == pytest.approx(
        {
            "grad_layer/layers.0": everything[:27].norm().item(),
            "grad_layer/layers.1": everything[27:].norm().item(),
            "optim/grad_norm": everything.norm().item(),
            "nonfinite/grad": 0,
        },
        rel=1e-6,
    )


def change_of(rank, shape, names, placements, grads):
    """What ``rank`` measures of one step of gradient descent by ``grads``, from weights of ones."""
    with one_of_four(rank, shape, names) as mesh:
        parameters = []
        for name, grad in grads.items():
            spec = placements.get(name)
            whole = torch.ones_like(grad)
            p = (whole if spec is None else part_of(whole, mesh, spec)).requires_grad_()  # a Parameter of it is made
            # by an operation, whose result DTensor keeps with the mesh of the rank that was played first
            p.grad = grad.clone() if spec is None else part_of(grad, mesh, spec)
            parameters.append((name, p))
        sample = UpdateSample.of(parameters, rank=rank)
        torch.optim.SGD([p for _, p in parameters], lr=0.1, foreach=False).step()
        return {} if sample is None else sample.stats()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_change_of_sharded_weights_is_that_of_the_whole_ones(layout):
    """Every element counts once, in float64, and the head is compared with the median of layers that no rank has."""
    grads = gradients() | {
        f"{name}.weight": torch.full((5,), size) for name, size in {"a": 3.0, "lm_head": 4.0}.items()
    }
    shape, names, placements = LAYOUTS[layout]
    placements = placements | dict.fromkeys(("a.weight", "lm_head.weight"), placements.get("layers.0.b"))
    stats = {}
    for rank in range(4):
        stats = merge_ranks(stats, change_of(rank, shape, names, placements, grads))
    exact = {name: 0.1 * torch.cat([grads[one].double().flatten() for one in members]) for name, members in {
        "layers.0": ("layers.0.w", "layers.0.b"), "layers.1": ("layers.1.w",), "a": ("a.weight",),
        "lm_head": ("lm_head.weight",),
    }.items()}  # fmt: skip
    ratios = {name: (change.norm() / len(change) ** 0.5).item() for name, change in exact.items()}
    every = torch.cat([*exact.values()])

    assert {name: stat.settle().value().item() for name, stat in stats.items()} == pytest.approx(
        {
            **{f"update_layer/{name}": ratio for name, ratio in ratios.items()},
            "optim/update_norm": every.norm().item(),
            "optim/update_ratio": (every.norm() / len(every) ** 0.5).item(),
            "optim/update_head": ratios["lm_head"] / sorted(ratios[name] for name in exact if name != "lm_head")[1],
        },
        rel=1e-5,
    )
    assert all(stat.settle().count > 0 for stat in stats.values())


def test_the_change_of_a_layer_without_one_of_its_shards_is_not_measured():
    """That of the layers which are whole is."""
    only_rows = {"layers.0.w": (ROWS,), "layers.0.b": (ROWS,)}
    stats = {}
    for rank in (0, 2, 3):
        stats = merge_ranks(stats, change_of(rank, (4,), ("shard",), only_rows, gradients()))

    assert values(stats).keys() == {"update_layer/layers.1"}


def test_changes_of_weights_that_an_engine_flattens_or_partitions_are_not_measured():
    """FSDP1 and ZeRO-3: what lies in the parameter is not the weight."""
    model = net()
    model["layers"][0].weight._fsdp_flattened = True
    model["layers"][0].bias.ds_id = 3

    assert UpdateSample.of(model.named_parameters()).stats().keys() == {
        "update_layer/layers.1", "optim/update_norm", "optim/update_ratio",
    }  # fmt: skip


def test_a_missing_rank_leaves_out_what_it_held_a_part_of():
    """A norm without a shard would be too small, and look healthy."""
    grads = gradients()
    only_rows = {"layers.0.w": (ROWS,), "layers.0.b": (ROWS,)}
    stats = {}
    for rank in (0, 2, 3):
        stats = merge_ranks(stats, norms_of(rank, (4,), ("shard",), only_rows, grads))

    assert values(stats) == {"grad_layer/layers.1": pytest.approx(grads["layers.1.w"].norm().item(), rel=1e-6)}


def test_a_gradient_that_still_waits_to_be_reduced_is_not_measured():
    """Its parts are summands, not shards."""
    with one_of_four(0, (4,), ("data",)) as mesh:
        p = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
        p.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)

        assert grad_norms([("w", p)]) is None


def test_a_nan_in_two_shards_is_one_broken_parameter():
    """Counted as one process counts it, and its layer has no finite norm."""
    grads = gradients()
    grads["layers.0.w"][0, 0] = grads["layers.0.w"][5, 0] = math.nan
    stats = {}
    for rank in range(4):
        stats = merge_ranks(stats, norms_of(rank, (4,), ("shard",), dict.fromkeys(grads, (ROWS,)), grads))
    got = values(stats)

    assert got["nonfinite/grad"] == 1
    assert math.isnan(got["grad_layer/layers.0"])
    assert math.isfinite(got["grad_layer/layers.1"])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_shard_makes_its_layer_and_the_whole_broken(broken):
    """And no other layer."""
    rank_0 = {"a": Norm.of(torch.tensor(1.0), 1, 2), "b": Norm.of(torch.tensor(1.0), 1, 2)}
    rank_1 = {"a": Norm.of(torch.tensor(broken), 1, 2), "b": Norm.of(torch.tensor(3.0), 1, 2)}

    together = merge_ranks(rank_0, rank_1)

    assert not together["a"].value().isfinite()
    assert together["b"].value() == 2.0
