"""Spikes of the gradient localised within verl's own worker: FSDP2 engine, losses, optimizer steps."""

import logging
import math

import numpy as np
import pytest
import tiny_verl as tiny
import torch
from transformers import Qwen2ForCausalLM

from rlwatch.integrations.localising import decoded_batches
from rlwatch.integrations.verl.localise import RankLocalising
from rlwatch.integrations.verl.ranks import accepted
from rlwatch.records import CULPRITS, RESPONSES

ALWAYS = {"threshold": 1e-9, "culprits": 2}
"""Every optimizer step is localised."""
SELDOM = {"culprits": 2}
"""None is, because a run must warm up first; but everything is kept for it."""
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
UNCAPPED = f"{ACTOR}.clip_ratio_c=1e6"
PACKED = f"{MODEL}.use_remove_padding=True"
FUSED = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch")


@pytest.fixture(autouse=True)
def as_verl_made_it():
    """verl's fused kernels change the class of the model, and the taps the registry of losses."""
    forward = Qwen2ForCausalLM.forward
    yield
    Qwen2ForCausalLM.forward = forward
    tiny.untap()


def localising(policy, *overrides, role="actor_rollout_ref", **wish):
    """A worker that localises every optimizer step unless told otherwise."""
    tiny.untap()
    worker = tiny.make_worker(policy, UNCAPPED, *overrides, role=role)
    assert tiny.attach(worker, "full", localise=wish or ALWAYS)["not_localised"] is None
    return worker


def found_in(worker, step=1):
    """[(event, {reason: batch})] of the optimizer steps that were localised since the last call."""
    (reply,) = accepted([worker.rlwatch_collect(step)])
    assert reply["errors"] == 0
    return [(one["event"], {b.reason: b for b in decoded_batches(one["batches"])}) for one in reply["localised"]]


def planted(row=2, position=3, *, rows=8, length=4, **changes):
    """A batch with one token that has become e^4 times likelier than it was, in a response to be avoided."""
    old = [torch.full((length,), -2.8) for _ in range(rows)]
    old[row][position] = -6.8
    advantages = [torch.full((length,), -0.2 if i == row else 0.2) for i in range(rows)]
    return tiny.batch_of(3, rows, lengths=[length] * rows, old_log_probs=old, advantages=advantages, **changes)


ONE_STEP = {"mini_batch_size": 8, "global_batch_size": 8, "micro_batch_size_per_gpu": 2}


def watched_gradients(worker, look):
    """``look(engine, passes)`` at each optimizer step, where the gradient is complete; returns what it returned."""
    seen, engine = [], worker.actor.engine
    check = RankLocalising.check

    def looking(self, norms):
        seen.append(look(engine, self.localiser.passes.all))
        return check(self, norms)

    return seen, looking


def gradient_again(engine, passes):
    """Of the loss, put together again from each pass's forward and coefficients; and the one the engine holds."""
    held = {name: p.grad for name, p in engine.module.named_parameters() if p.requires_grad}
    for p in engine.module.parameters():
        p.grad = None
    for one in passes:
        out = one.forward()
        torch.autograd.backward(list(out.parts().values()), [one.coefficient(name) for name in out.parts()])
    again = {name: p.grad for name, p in engine.module.named_parameters() if p.requires_grad}
    for name, p in engine.module.named_parameters():
        p.grad = held.get(name)
    engine.module.reshard()
    return {name: gradient.full_tensor().clone() for name, gradient in held.items()}, again  # a copy: verl clips next


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ([], {}),
        pytest.param([PACKED], {}, marks=pytest.mark.thorough),
        pytest.param([f"{ACTOR}.entropy_coeff=0.1"], {"calculate_entropy": True}, marks=pytest.mark.thorough),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo", PACKED], {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}),
        pytest.param(FUSED, {}, marks=pytest.mark.thorough),
        ([PACKED, *FUSED], {}),
    ],
    ids=["padded", "packed", "entropy bonus", "sequence ratios and dynamic micro-batches", "fused", "fused and packed"],
)
def test_forwards_and_coefficients_are_the_engines(policy, monkeypatch, overrides, settings):
    """Run again and differentiated with the coefficients the loss left, the passes give the gradient the engine holds."""
    worker = localising(policy, *overrides, **SELDOM)
    seen, looking = watched_gradients(worker, gradient_again)
    monkeypatch.setattr(RankLocalising, "check", looking)

    tiny.update(worker, tiny.batch_of(1), **settings)

    assert len(seen) == 2
    for held, again in seen:
        assert held.keys() == again.keys()
        for name, gradient in held.items():
            torch.testing.assert_close(again[name].full_tensor(), gradient, rtol=1e-4, atol=1e-6)


def test_a_sequence_alone_computes_the_same(policy, monkeypatch):
    """Of one sequence of a packed micro-batch, in the width of all; and the tokens are those of the batch."""
    worker = localising(policy, PACKED, **SELDOM)

    def alone(engine, passes):
        with torch.no_grad():
            return [(one.forward().logp[[1]], one.forward([1]).logp, one.tokens) for one in passes]

    seen, looking = watched_gradients(worker, alone)
    monkeypatch.setattr(RankLocalising, "check", looking)
    data = tiny.batch_of(1, lengths=[3, 4, 6, 2, 5, 6, 1, 4])
    tiny.update(worker, data, **ONE_STEP)

    (passes,) = seen
    for together, one, _ in passes:
        torch.testing.assert_close(one, together, rtol=1e-5, atol=1e-6)
    second = passes[1][2]
    assert second.mask.tolist() == [[True] * 6, [True] * 2 + [False] * 4]
    assert second.ids[0].tolist() == data["responses"].unbind()[2].tolist()
    torch.testing.assert_close(second.ref_logp[1, :2], data["ref_log_prob"].unbind()[3])
    assert second.advantages[1, 2:].tolist() == [0.0] * 4


@pytest.mark.parametrize("overrides", [[], [PACKED]], ids=["padded", "packed"])
def test_the_culprit_is_named(policy, overrides):
    """One token of the second micro-batch: by sequence, position and id, with the ratio that explains it."""
    worker = localising(policy, *overrides)
    data = planted(row=2, position=3)

    theirs = tiny.update(worker, data, **ONE_STEP)

    ((event, batches),) = found_in(worker, step=7)
    assert event["norm"] == pytest.approx(theirs["grad_norm"][0], rel=1e-5)
    assert abs(event["gap"]) < 1e-3
    assert (event["complete"], event["cause"], event["tokens"]) == (True, "token ratio", 32)
    culprits = batches[CULPRITS]
    assert (culprits.step, culprits.rank) == (7, 0)
    worst = {name: column[0] for name, column in culprits.columns.items()}
    assert (worst["sequence"], worst["position"], worst["microbatch"]) == (2, 3, 1)
    assert worst["token_id"] == data["responses"].unbind()[2][3]
    assert worst["ratio"] > 20
    assert worst["verified"] == 1
    assert worst["share"] > 0.5


def test_contributions_of_the_response_are_kept(policy):
    """Every token of the culprit's response, with what the reference and the rollout engine said of it."""
    worker = localising(policy)
    scores = [torch.tensor([0.0, 0.0, 0.0, float(i)]) for i in range(8)]
    data = planted(rm_scores=scores)

    tiny.update(worker, data, **ONE_STEP)

    ((_, batches),) = found_in(worker)
    kept = batches[RESPONSES].columns
    rows = kept["sequence"] == 2
    assert kept["position"][rows].tolist() == [0, 1, 2, 3]
    assert kept["rollout_logp"][rows] == pytest.approx(data["rollout_log_probs"].unbind()[2].numpy())
    assert kept["reward"][rows].tolist() == [2.0] * 4
    assert np.abs(kept["contribution"][rows]).argmax() == 3


def test_each_optimizer_step_is_one_of_its_own(policy):
    """Two mini-batches, twice over: four steps, each with the tokens of its own micro-batches and nothing else."""
    worker = localising(policy)

    theirs = tiny.update(worker, tiny.batch_of(2, lengths=[1, 2, 3, 4, 5, 6, 6, 6]), epochs=2)

    found = found_in(worker, step=3)
    assert [event["tokens"] for event, _ in found] == [10, 23, 10, 23]
    assert [event["norm"] for event, _ in found] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert all(abs(event["gap"]) < 1e-3 for event, _ in found)
    assert found_in(worker, step=4) == []


def test_an_ordinary_step_is_let_pass(policy):
    """Nothing is localised while the run has no level to compare with, and nothing is kept of the step."""
    worker = localising(policy, **SELDOM)

    tiny.update(worker)

    assert found_in(worker) == []
    assert worker.rlwatch.localising.localiser.passes.all == []


def test_the_budget_is_that_of_the_workers_life(policy):
    """The first spike is granted beyond it; then none, at whatever step, until enough training has gone by; each says so."""
    worker = localising(policy, **ALWAYS, allowance_s=0.0, share=1e-6)

    for step, localised, refused in [(1, 1, 1), (2, 0, 3)]:
        tiny.update(worker)
        (reply,) = accepted([worker.rlwatch_collect(step)])
        why_not = [one["event"]["why_not"] for one in reply["localised"]]
        assert (why_not.count(""), reply["localisations_refused"]) == (localised, refused)
        assert all("budget" in why for why in why_not if why)


class Scaler(torch.amp.GradScaler):
    """A float16 scaler on the CPU, as verl's engine has one on a GPU; counts who waits for its number."""

    asked = 0

    def get_scale(self):
        self.asked += 1
        return super().get_scale()


def test_a_loss_scale_is_taken_out_and_comes_with_the_norms(policy):
    """Once what it is multiplied with is known, nobody asks for it by itself: on a GPU that would be another wait."""
    plain = localising(policy)
    tiny.update(plain, planted(), **ONE_STEP)
    ((expected, _),) = found_in(plain)
    scaled = localising(policy)
    scaler = scaled.actor.engine.scaler = Scaler("cpu", init_scale=1024.0)
    tiny.update(scaled, planted(), **ONE_STEP)

    ((event, batches),) = found_in(scaled)
    assert event["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    assert abs(event["gap"]) < 1e-3
    assert (batches[CULPRITS].columns["sequence"][0], batches[CULPRITS].columns["position"][0]) == (2, 3)
    assert scaler.asked == 0


def test_adapters_are_localised(policy):
    """LoRA: the gradient of the adapters alone."""
    lora = [f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=all-linear"]
    worker = localising(policy, *lora, role="actor_rollout")

    tiny.update(worker, planted(), **ONE_STEP)

    ((event, batches),) = found_in(worker)
    assert abs(event["gap"]) < 1e-3
    assert (batches[CULPRITS].columns["sequence"][0], batches[CULPRITS].columns["position"][0]) == (2, 3)


def test_a_nan_is_traced_to_its_token(policy):
    """A gradient of NaN has no direction; the advantage that made it has a place. verl skips the step as ever."""
    worker = localising(policy)
    data = planted()
    data["advantages"].values()[5 * 4 + 1] = torch.nan
    before = tiny.weights_of(worker)

    tiny.update(worker, data, **ONE_STEP)

    ((event, batches),) = found_in(worker)
    assert math.isnan(event["norm"])
    assert (event["method"], event["cause"]) == ("trace", "non-finite")
    assert "advantage" in event["message"]
    culprits = batches[CULPRITS].columns
    assert list(zip(culprits["sequence"], culprits["position"], strict=True)) == [(5, 1)]
    assert all(torch.equal(before[name], weight) for name, weight in tiny.weights_of(worker).items())


def test_text_is_kept_only_where_it_is_asked_for(policy):
    """With verl's own tokenizer."""
    for text in (False, True):
        worker = tiny.make_worker(policy, UNCAPPED)
        tiny.attach(worker, "full", localise=ALWAYS, text=text)
        tiny.update(worker, planted(), **ONE_STEP)
        ((_, batches),) = found_in(worker)
        columns = batches[CULPRITS].columns
        assert ("text" in columns) is text
        tiny.untap()

    digit = columns["text"][0]
    assert digit == worker.actor.engine.model_config.tokenizer.decode([int(columns["token_id"][0])])


def test_a_failure_of_rlwatch_is_none_of_the_training(policy, monkeypatch, caplog):
    """The same numbers, one warning, and after three failures nothing is kept any more."""
    plain = tiny.make_worker(policy, UNCAPPED)
    without = tiny.update(plain, epochs=2)
    worker = localising(policy)
    monkeypatch.setattr("rlwatch.integrations.localising.locate", broken)

    with caplog.at_level(logging.WARNING, "rlwatch"):
        theirs = tiny.update(worker, epochs=2)

    assert theirs["grad_norm"] == without["grad_norm"]
    assert caplog.text.count("could not read spike of the gradient (training goes on)") == 1
    assert worker.rlwatch_collect(1)["errors"] == 3
    assert worker.rlwatch.localising.localiser.passes.all == []


def broken(*args, **kwargs):
    raise RuntimeError("a bug of ours")


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [("fsdp", "FSDP1 flattens parameters"), ("megatron", "megatron does not show gradients")],
)
def test_engines_without_single_gradients_say_so(policy, strategy, reason):
    """Everything else is measured as ever."""
    worker = tiny.make_worker(policy)
    worker.config.actor.strategy = strategy

    reply = tiny.attach(worker, "full", localise=ALWAYS)
    tiny.update(worker)

    assert reply["not_localised"].startswith(reason)
    assert "strategy=fsdp2" in reply["not_localised"]
    assert "ratio/mean" in tiny.measured(worker).metrics


def test_sequence_parallelism_is_refused(policy, monkeypatch):
    """Its ranks have parts of sequences."""
    worker = tiny.make_worker(policy)
    monkeypatch.setattr(worker.actor.engine, "ulysses_sequence_parallel_size", 2)

    assert "sequence parallelism" in tiny.attach(worker, "full", localise=ALWAYS)["not_localised"]


def test_nothing_is_localised_unless_it_is_wished(policy):
    """Then neither the forward is wrapped nor anything kept."""
    worker = tiny.make_worker(policy)

    assert tiny.attach(worker, "full")["not_localised"] is None
    assert "forward_step" not in vars(worker.actor.engine)
