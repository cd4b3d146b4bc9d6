"""A recorded step run again gives the figures that were recorded; on other parameters it says so."""

import math
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_step import LOSSES, Outputs, dapo, dapo_entropy, outputs, plant, policy, rollouts, take_step

from rlwatch.errors import ConfigError
from rlwatch.gradloc.attribution import attribute
from rlwatch.gradloc.culprits import culprit_of, culprits_of_trace, describe, on_host, step_levels
from rlwatch.gradloc.direction import Direction
from rlwatch.gradloc.nonfinite import trace
from rlwatch.gradloc.recording import (
    Context,
    Figure,
    RecordingError,
    fingerprint,
    load_model,
    load_recording,
    replay,
    save_recording,
)
from rlwatch.gradloc.report import Localisation, Method
from rlwatch.gradloc.verification import union_candidates, verify

pytestmark = pytest.mark.torch


def localised(model, passes):
    """The report on the gradient held now, and the contributions."""
    direction, hosts = Direction.of(model), on_host(passes)
    found = attribute(model, passes, direction)
    tokens = union_candidates(passes, found.contributions, [], 2)
    own, levels = verify(model, passes, tokens), step_levels(hosts)
    culprits = [
        culprit_of(
            describe(hosts, at),
            levels,
            norm=direction.norm,
            contribution=float(found.contributions[at.microbatch][at.row, at.position]),
            own=own[at] if i < 2 else None,
        )
        for i, at in enumerate(tokens)
    ]
    report = Localisation(direction.norm, None, 0, found.method, found.gap, found.complete, culprits, direction.layers)
    return report, found.contributions


def contexts(batch, micro_batches, *, temperature=1.0):
    """What the forward of each micro-batch read: everything."""
    parts = torch.arange(len(batch.ids)).tensor_split(micro_batches)
    return [Context(batch.ids[rows], torch.ones_like(batch.ids[rows]), temperature) for rows in parts]


def recorded(folder, loss=dapo, *, model=None, micro_batches=2, temperature=1.0, **more):
    """A model, and the file of one step of it with a culprit."""
    model = model or policy(hidden=16)
    batch, _ = plant(rollouts(model, batch=4, length=10), "ratio", 1, math.exp(5.0))

    def forward(model, ids, prompt):
        return outputs(model, ids, prompt, temperature=temperature)

    passes = take_step(model, batch, loss, micro_batches=micro_batches, forward=forward)
    report, contributions = localised(model, passes)
    seen = contexts(batch, micro_batches, temperature=temperature)
    path = save_recording(
        folder, 7, report, model=model, passes=passes, contexts=seen, contributions=contributions, **more
    )
    return model, report, path


@pytest.mark.parametrize("name", LOSSES)
def test_replaying_reproduces_the_figures_of_every_loss(tmp_path, name):
    """Norm, layers, contributions, own norms: the coefficients hold all that the loss did."""
    model, report, path = recorded(tmp_path, LOSSES[name])

    found = replay([load_recording(path)], model)
    by_name = {figure.name: figure for figure in found.figures}

    assert (found.agrees, found.same_parameters, found.notes) == (True, True, ())
    assert by_name["gradient norm"].recomputed == pytest.approx(report.norm, rel=1e-6)
    assert by_name["log-probs: largest difference, nats"].recomputed < 1e-6
    assert by_name["contributions: largest difference of any token"].recomputed < 1e-4 * report.norm
    assert sum(figure.name.startswith("share of ") for figure in found.figures) == len(report.layers) == 4
    assert sum(figure.name.startswith("own norm of ") for figure in found.figures) == 2
    assert sum(figure.name.startswith("contribution of ") for figure in found.figures) == len(report.culprits)
    assert all(figure.agrees for figure in found.figures)
    assert abs(found.gap) < 1e-3


def test_a_model_read_from_disk_replays_what_the_trainer_had(tmp_path):
    """As the command does it: nothing of the process that recorded is needed."""
    model, _, path = recorded(tmp_path / "steps")
    model.save_pretrained(tmp_path / "model")

    found = replay([load_recording(path)], load_model(tmp_path / "model", load_recording(path).dtype))

    assert (found.agrees, found.same_parameters) == (True, True)


def test_other_parameters_are_said_and_do_not_agree(tmp_path):
    """One optimizer step later the gradient is another."""
    model, _, path = recorded(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    found = replay([load_recording(path)], model)

    assert (found.agrees, found.same_parameters) == (False, False)
    assert not {figure.name: figure for figure in found.figures}["gradient norm"].agrees


def test_temperature_and_an_entropy_bonus_are_replayed(tmp_path):
    """Logits are divided as they were; the entropy's coefficient is part of the gradient."""
    model, _, path = recorded(tmp_path, dapo_entropy, temperature=0.7)
    record = load_recording(path)

    assert "entropy_coefficient" in record.passes[0]
    assert replay([record], model).agrees
    assert not replay([replace(record, temperatures=(1.0, 1.0))], model).agrees


def test_left_padded_prompts_are_replayed_with_their_attention(tmp_path):
    """The mask of the context is part of the record."""
    model = policy(hidden=16)
    batch = rollouts(model, batch=4, prompt=6, length=8)
    attention = torch.ones_like(batch.ids)
    attention[1, :3] = attention[3, :2] = 0

    def forward(model, ids, prompt):
        rows = [(batch.ids == one).all(1).nonzero()[0, 0] for one in ids]
        logits = model(input_ids=ids, attention_mask=attention[torch.stack(rows)]).logits[:, prompt - 1 : -1]
        every = logits.float().log_softmax(-1)
        return Outputs(every.gather(-1, ids[:, prompt:, None])[..., 0], -(every.exp() * every).sum(-1))

    passes = take_step(model, batch, forward=forward)
    report, contributions = localised(model, passes)
    path = save_recording(
        tmp_path, 1, report, model=model, passes=passes, contexts=[Context(batch.ids, attention)],
        contributions=contributions,
    )  # fmt: skip
    record = load_recording(path)

    assert replay([record], model).agrees
    blind = {**record.passes[0], "attention": np.ones_like(record.passes[0]["attention"])}
    assert not replay([replace(record, passes=[blind])], model).agrees


def test_dropout_is_drawn_again(tmp_path):
    """From the state of the generator before the forward."""
    model, _, path = recorded(tmp_path, model=policy(hidden=16, dropout=0.2))
    record = load_recording(path)

    assert replay([record], model).agrees
    dry = [{name: values for name, values in one.items() if name != "random"} for one in record.passes]
    assert not replay([replace(record, passes=dry)], model).agrees


def test_of_several_ranks_all_files_are_wanted(tmp_path):
    """The gradient is their mean: each file has the coefficients of its own micro-batches."""
    model = policy(hidden=16)
    batch, _ = plant(rollouts(model, batch=4, length=10), "ratio", 1, math.exp(5.0))
    passes = take_step(model, batch, micro_batches=2)
    report, contributions = localised(model, passes)
    paths = []
    for rank, one in enumerate(passes.all):
        one.coefficients = {name: 2 * values for name, values in one.coefficients.items()}  # as before the mean
        part = replace(passes, all=[one])
        ours = replace(
            report, culprits=[replace(c, at=replace(c.at, rank=c.at.microbatch, microbatch=0)) for c in report.culprits]
        )
        paths.append(save_recording(
            tmp_path, 7, ours, model=model, passes=part, contexts=[contexts(batch, 2)[rank]],
            contributions=[contributions[rank]], rank=rank, ranks=2,
        ))  # fmt: skip
    records = [load_recording(path) for path in paths]

    assert replay(records, model).agrees
    with pytest.raises(RecordingError, match=r"mean of 2 ranks: pass their 2 files, got those of \[1\]"):
        replay(records[1:], model)
    with pytest.raises(RecordingError, match=r"one step are wanted, got those of \[7, 9\]"):
        replay([records[0], replace(records[1], step=9)], model)


def test_a_step_that_was_not_finite_is_not_finite_again(tmp_path):
    """NaN agrees with NaN, and there is no direction to attribute along."""
    model = policy(hidden=16)
    batch = rollouts(model, batch=4, length=8)
    batch.advantages[1, 2] = math.nan
    passes = take_step(model, batch)
    culprits = culprits_of_trace(on_host(passes), trace(model, passes))
    report = Localisation(math.nan, method=Method.TRACE, culprits=culprits)
    path = save_recording(tmp_path, 1, report, model=model, passes=passes, contexts=contexts(batch, 1))

    found = replay([load_recording(path)], model)

    assert found.figures[0].agrees
    assert math.isnan(found.figures[0].recomputed)
    assert (found.agrees, found.gap) == (True, None)
    assert found.notes == ("no contributions: the gradient is not finite, so it has no direction",)


def test_in_bfloat16_the_record_keeps_the_type_and_allows_for_rounding(tmp_path):
    """numpy has no bfloat16: what was recorded is its float32."""
    model, _, path = recorded(tmp_path, model=policy(hidden=16).to(torch.bfloat16))
    record = load_recording(path)

    found = replay([record], model)

    assert record.dtype == "bfloat16"
    assert found.agrees
    assert found.figures[0].tolerance > 1e-2


def test_a_record_is_for_its_owner_and_has_its_name_only_when_whole(tmp_path, monkeypatch):
    """It holds prompts and responses. When writing fails nothing is left, and an older one stays."""
    model, _, path = recorded(tmp_path / "new" / "steps")

    assert path.name == "step00000007-rank0.npz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space"):
        recorded(tmp_path / "new" / "steps", model=model)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"text", "half", "array", "newer", "pickle"])
def test_what_is_no_record_is_refused_by_name(tmp_path, content):
    """Cut short, something else, a newer one; and nothing in a file is ever executed."""
    _, _, whole = recorded(tmp_path / "steps")
    path = tmp_path / "some.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "half":
        path.write_bytes(whole.read_bytes()[:2000])
    else:
        head = {"newer": '{"format": 2}', "pickle": {"format": 1}, "array": "[]"}[content]
        np.savez(path, head=np.array(head, dtype=object if content == "pickle" else None))

    with pytest.raises(RecordingError, match=r"some\.npz"):
        load_recording(path)


def test_an_auxiliary_loss_is_said_not_to_be_replayed(tmp_path):
    """A router's balance is no token's."""
    model = policy(hidden=16)
    batch = rollouts(model, batch=4, length=8)
    passes = take_step(model, batch)
    passes.all[0].coefficients["aux"] = torch.tensor(0.1)
    path = save_recording(
        tmp_path, 1, localised(model, passes)[0], model=model, passes=passes, contexts=contexts(batch, 1)
    )

    assert "auxiliary" in load_recording(path).notes[0]


def test_the_fingerprint_is_of_shapes_and_values():
    """The same for a copy in another process, another after a change; none of shards."""
    one, other = policy(hidden=16), policy(hidden=16)

    assert fingerprint(one) == fingerprint(other) != fingerprint(policy(hidden=16, seed=1))
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    ("recorded", "recomputed", "agrees"),
    [
        (1.0, 1.0009, True),
        (1.0, 1.0011, False),
        (math.inf, math.inf, True),
        (math.inf, math.nan, False),
        (None, 1.0, None),
    ],
)
def test_figures_agree_as_far_as_rounding_goes(recorded, recomputed, agrees):
    """What one side does not have is no disagreement."""
    assert Figure("x", recorded, recomputed).agrees is agrees


def test_a_folder_without_a_model_is_a_plain_error(tmp_path):
    """What to pass, in one line."""
    with pytest.raises(ConfigError, match="no causal language model could be loaded"):
        load_model(tmp_path, "float32")
