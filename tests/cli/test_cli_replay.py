"""``rlwatch replay``: recorded beside recomputed figures; agreeing is code 0, differing 1, unreadable 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_helpers import Invoke, strict

from rlwatch.cli import replay as command

pytestmark = pytest.mark.torch


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def _record(folder: Path, model: Any) -> Path:
    """A step of two responses of five tokens, with REINFORCE's loss and one token's advantage far out."""
    from rlwatch.gradloc.attribution import attribute
    from rlwatch.gradloc.direction import Direction
    from rlwatch.gradloc.passes import LossPass, Outputs, RandomState, RecordedPasses
    from rlwatch.gradloc.recording import Context, save_recording
    from rlwatch.gradloc.report import Culprit, ExcessFactor, Localisation, TokenAt
    from rlwatch.gradloc.verification import verify
    from rlwatch.tensors.tokens import TokenBatch

    ids = torch.arange(16).view(2, 8)
    advantages = torch.ones(2, 5)
    advantages[1, 3] = 50.0

    def forward(rows: Any = None) -> Any:
        chosen = ids if rows is None else ids[list(rows)]
        every = model(input_ids=chosen).logits[:, 2:-1].log_softmax(-1)
        return Outputs(every.gather(-1, chosen[:, 3:, None])[..., 0])

    outputs, passes = forward(), RecordedPasses()
    one: LossPass = passes.add(
        forward, outputs, TokenBatch(outputs.logp.detach(), torch.ones(2, 5)), random=RandomState.now()
    )
    (-advantages * outputs.logp).sum().backward()
    direction, at = Direction.of(model), TokenAt(0, 0, 1, 3)
    contributions = attribute(model, passes, direction).contributions
    culprit = Culprit(
        at, 1, 14, ExcessFactor.REWARD_OUTLIER, "", float(contributions[0][1, 3]), own=verify(model, passes, [at])[at]
    )
    report = Localisation(direction.norm, gap=1e-5, culprits=[culprit], layers=direction.layers)
    assert one.shape == (2, 5)
    seen = [Context(ids, torch.ones_like(ids))]
    return save_recording(folder, 1200, report, model=model, passes=passes, contexts=seen, contributions=contributions)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The file, the model's folder, and that of the model after some training."""
    folder, model = tmp_path_factory.mktemp("replay"), _model()
    path = _record(folder / "steps", model)
    model.save_pretrained(folder / "before")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    model.save_pretrained(folder / "after")
    return path, folder / "before", folder / "after"


def test_figures_that_come_out_again_are_code_0(recorded: tuple[Path, Path, Path], invoke: Invoke) -> None:
    """Each beside the recorded one, with the parameters compared first."""
    path, before, _ = recorded

    result = invoke("replay", path, "--model", before)
    document = strict(invoke("replay", path, "--model", before, "--format", "json").stdout)

    assert result.exit_code == 0, result.output
    assert "parameters same as the recording" in result.stdout
    assert "contribution of token 14 (micro-batch 0, row 1, position 3)" in result.stdout
    assert "all figures agree" in result.stdout
    assert (document["step"], document["agrees"], document["same_parameters"]) == (1200, True, True)
    assert {figure["agrees"] for figure in document["figures"]} == {True}
    assert document["figures"][0]["name"] == "gradient norm"


def test_figures_of_other_parameters_are_code_1(recorded: tuple[Path, Path, Path], invoke: Invoke) -> None:
    """And it is said that the parameters are others."""
    path, _, after = recorded

    result = invoke("replay", path, "--model", after)

    assert result.exit_code == 1
    assert "parameters DIFFERENT from the recording" in result.stdout
    assert "differs" in result.stdout
    assert result.stdout.splitlines()[-1] == "figures differ"


def test_what_cannot_be_read_is_code_2_and_one_line(
    recorded: tuple[Path, Path, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """A file that is none, a file that is not there, a folder without a model."""
    path, before, _ = recorded
    (tmp_path / "log.txt").write_text("no recording")
    attempts = {
        "log.txt is no recorded step": (tmp_path / "log.txt", before),
        "No such file": (tmp_path / "absent.npz", before),
        "no causal language model": (path, tmp_path),
    }
    for message, (file, model) in attempts.items():
        result = invoke("replay", file, "--model", model, "--device", "cpu")

        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_device_that_is_none_is_a_plain_error(recorded: tuple[Path, Path, Path], invoke: Invoke) -> None:
    """Before anything is run."""
    path, before, _ = recorded

    result = invoke("replay", path, "--model", before, "--device", "toaster")

    assert result.exit_code == 2
    assert "on toaster" in result.stderr


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_what_it_needs_it_says_what_to_install(
    absent: str, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither comes with the command line."""
    monkeypatch.setitem(sys.modules, absent, None)

    result = invoke("replay", tmp_path / "x.npz", "--model", tmp_path)

    assert result.exit_code == 2
    assert f"pip install {absent}" in result.stderr


def test_of_many_layers_the_largest_and_those_that_differ_are_shown() -> None:
    """In their order; every other figure as well."""
    from rlwatch.gradloc.recording import Figure

    shares = [Figure(f"share of layers.{i}", 0.1, 0.9 if i == 20 else 0.1) for i in range(30)]
    figures = [Figure("gradient norm", 1.0, 1.0), *shares, Figure("own norm of it", 1.0, None)]

    shown = [figure.name for figure in command.shown(figures)]

    assert shown == ["gradient norm", *(f"share of layers.{i}" for i in (*range(8), 20)), "own norm of it"]
