"""The watcher in a real loop: what it records, what it says is missing, and how it ends."""

import inspect
import logging
import math

import pytest
import torch
from tiny_loop import CLIP, EOS, VOCABULARY, FakeRun, Policy, fresh_policy, train
from torch import nn

import rlwatch
from rlwatch.errors import ConfigError
from rlwatch.integrations.level import Level
from rlwatch.integrations.torch.attach import SUBJECTS
from rlwatch.integrations.torch.compat import WatcherSettings
from rlwatch.metrics import BY_NAME, metric_of
from rlwatch.metrics.table import OPEN
from rlwatch.store.url import open_store

pytestmark = pytest.mark.torch


def watched(**kwargs):
    """Makes a watcher of everything, on a fake run."""

    def make(policy, optimizer, reference):
        given = {"ref_model": reference, "clip": CLIP, "eos": EOS, "run": FakeRun(), **kwargs}
        return rlwatch.Watcher(policy, optimizer, **given)

    return make


def bare(**kwargs):
    """A watcher outside any loop, and its run."""
    run = FakeRun()
    return rlwatch.Watcher(run=run, **kwargs), run


def batch(rows=2, width=3):
    return {"logp": -torch.rand(rows, width), "mask": torch.ones(rows, width)}


# --- what is recorded --------------------------------------------------------------------------------


def test_every_step_of_a_loop_is_recorded_under_canonical_names():
    """Rewards, tokens, gradients and scalars of each step; nothing refused, nothing raised."""
    run = train(watched(), steps=3, accumulate=2).watcher.run

    assert list(run.steps) == [1, 2, 3]
    assert run.counters.snapshot() == {}
    for metrics in run.steps.values():
        assert {"reward/mean", "reward/zero_std_frac", "len/p90", "policy/entropy", "policy/kl_ref_k3"} < set(metrics)
        assert {"ratio/clipfrac", "adv/std", "grad_layer/layers.1", "optim/grad_norm", "loss/raw"} < set(metrics)
        assert {name for name in metrics if metric_of(name) is None} == set()


def test_the_numbers_are_those_of_the_loop():
    """Means over all tokens of all micro-batches of unequal size, the norm before clipping, the rate of the step."""
    outcome = train(watched(), steps=1, accumulate=3)
    (rollouts,), metrics = outcome.batches, outcome.watcher.run.steps[1]

    assert metrics["reward/mean"] == pytest.approx(rollouts.rewards.mean().item())
    assert metrics["len/mean"] == pytest.approx(rollouts.mask.sum(1).float().mean().item())
    assert metrics["adv/std"] == pytest.approx(rollouts.advantages.std().item())
    assert metrics["optim/lr"] == 5e-3
    assert metrics["optim/grad_norm"] == pytest.approx(
        math.sqrt(sum(v**2 for n, v in metrics.items() if n.startswith("grad_layer/"))), rel=1e-5
    )


def test_micro_batches_and_one_batch_give_the_same_statistics():
    """However the step is cut, as far as the loop is the same (no dropout)."""

    def steady(policy, optimizer, reference):
        policy.drop.p = 0.0
        return watched()(policy, optimizer, reference)

    whole = train(steady, steps=1, accumulate=1).watcher.run.steps[1]
    cut = train(steady, steps=1, accumulate=5).watcher.run.steps[1]

    tokenwise = [n for n in whole if n.startswith(("policy/", "ratio/", "adv/", "reward/", "len/"))]
    for name in tokenwise:
        assert cut[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_a_step_that_reuses_rollouts_has_no_rewards_of_its_own():
    """Rollouts belong to the first step that trains on them; they are not repeated."""
    run = train(watched(), steps=4, epochs=2).watcher.run

    assert ["reward/mean" in metrics for metrics in run.steps.values()] == [True, False, True, False]
    assert all("policy/entropy" in metrics for metrics in run.steps.values())


def test_scalars_of_ones_own_are_recorded_beside():
    """By any name, as floats, numbers or tensors; NaN is a value, None is not."""
    watcher, run = bare()
    watcher.step(5, loss=torch.tensor(math.nan), grad_norm=1.5, lr=1e-3, value_loss=torch.tensor(0.25), hits=3, no=None)

    (metrics,) = run.steps.values()
    assert math.isnan(metrics.pop("loss/raw"))
    metrics.pop("time/step")
    assert metrics == {
        "nonfinite/loss": 1.0, "optim/grad_norm": 1.5, "optim/lr": 1e-3, "value_loss": 0.25, "hits": 3.0
    }  # fmt: skip


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_number_that_is_passed_stands_for_the_measured_one(kind):
    """Of two of one name the loop's own counts, and the step is recorded."""
    policy, run = nn.Linear(2, 1), FakeRun()
    watcher = rlwatch.Watcher(policy, run=run)
    policy(torch.ones(1, 2)).sum().backward()
    watcher.observe(**batch())
    watcher.gradients()
    watcher.step(1, grad_norm=kind(7.0), **{"policy/logp_mean": kind(-9.0)})

    assert (run.steps[1]["optim/grad_norm"], run.steps[1]["policy/logp_mean"]) == (7.0, -9.0)
    assert run.counters.snapshot() == {}


def test_steps_count_themselves_unless_told():
    """From 1, or on from the number given; what is no number is refused and counted on."""
    watcher, run = bare()
    for step in (None, None, 10, None, "late", -1):
        watcher.step(step, loss=0.0)

    assert list(run.steps) == [1, 2, 10, 11, 12, 13]
    assert run.counters["refused"] == 2


def test_the_rate_is_that_of_the_step_although_the_schedule_has_moved_on():
    """The loop calls the scheduler before the watcher; one may also pass it."""
    policy = fresh_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = FakeRun()
    watcher = rlwatch.Watcher(policy, optimizer, run=run)
    for lr in (None, None, 0.7):
        watcher.gradients()
        optimizer.step()
        scheduler.step()
        watcher.step(lr=lr)

    assert [metrics["optim/lr"] for metrics in run.steps.values()] == [0.1, 0.05, 0.7]


def test_a_rate_kept_in_a_tensor_is_the_one_of_its_time():
    """Capturable optimizers change it in place."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5))
    run = FakeRun()
    watcher = rlwatch.Watcher(None, optimizer, run=run)
    watcher.observe(**batch())
    optimizer.param_groups[0]["lr"].fill_(0.25)
    watcher.step()

    assert run.steps[1]["optim/lr"] == 0.5


def test_what_the_model_and_the_loop_say_of_themselves_is_recorded():
    """The size of the vocabulary, the weight of the KL term now."""
    policy = fresh_policy()
    policy.config = type("Config", (), {"vocab_size": VOCABULARY})
    weight = [0.1]
    run = FakeRun()
    watcher = rlwatch.Watcher(policy, run=run, kl_coef=lambda: weight[0])
    watcher.step(1)
    weight[0] = 0.2
    watcher.step(2)

    assert [m["policy/kl_coef"] for m in run.steps.values()] == [0.1, 0.2]
    assert run.steps[1]["policy/vocab_size"] == VOCABULARY


def test_the_most_extreme_tokens_are_kept_with_text_only_if_asked():
    """Without text no text leaves the trainer."""

    class Letters:
        eos_token_id = 7

        def decode(self, ids, **_):
            return "".join(chr(97 + i) for i in ids)

        def encode(self, text, **_):
            return [ord(c) - 97 for c in text]

    for text in (False, True):
        watcher, run = bare(tokenizer=Letters(), text=text)
        logp = torch.tensor([[-0.5, -40.0]])
        watcher.observe(logp=logp, mask=torch.ones(1, 2), ids=torch.tensor([[1, 2]]))
        watcher.step(1)
        (spikes,) = run.spikes
        assert spikes.columns["token_id"].tolist() == [2]
        assert list(spikes.columns.get("text", [])) == (["c"] if text else [])


def test_a_loss_scale_does_not_show_before_or_after_it_is_taken_out():
    """The norms are those of an unscaled loop."""
    norms = []
    for scaled, unscale in ((False, False), (True, False), (True, True)):
        policy = fresh_policy()
        policy.drop.p = 0.0
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        run = FakeRun()
        watcher = rlwatch.Watcher(policy, optimizer, run=run, scaler=scaler)
        loss = policy(torch.ones(1, 3, dtype=torch.int64)).square().mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        watcher.gradients()
        scaler.step(optimizer)
        scaler.update()
        watcher.step(1)
        norms.append({n: v for n, v in run.steps[1].items() if n.startswith(("grad_layer/", "optim/grad_norm"))})
        assert run.steps[1].get("optim/step_skipped", 0.0) == 0.0

    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-5)


def test_an_overflow_is_a_skipped_step_and_a_zero_gradient_is_zero():
    """How a scaler finds its scale is no measurement; nothing to learn is one."""
    for gradient, skipped in ((math.inf, 1.0), (0.0, 0.0)):
        parameter = nn.Parameter(torch.zeros(3))
        model = nn.ParameterDict({"w": parameter})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run = FakeRun()
        watcher = rlwatch.Watcher(model, optimizer, run=run, scaler=scaler)
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.full((3,), gradient)
        watcher.gradients()
        watcher.step(1)

        assert run.steps[1]["optim/step_skipped"] == skipped
        for name in ("optim/grad_norm", "grad_layer/w"):
            assert run.steps[1].get(name) == (None if skipped else 0.0)


# --- levels ------------------------------------------------------------------------------------------


def test_each_level_adds_to_the_one_before():
    """Scalars and rewards always; then tokens, gradients, and what sorts and compares."""
    measured = {}
    for level in Level:
        run = train(watched(level=level), steps=1).watcher.run
        measured[level] = set(run.steps[1])

    scalars, tokens, gradients, full = measured.values()
    assert scalars < tokens < gradients < full
    assert {"loss/raw", "reward/mean", "optim/lr"} < scalars
    assert {"policy/entropy", "ratio/mean", "policy/kl_ref_k3"} < tokens - scalars
    assert {name.split("/")[0] for name in gradients - tokens} == {"grad_layer", "update_layer", "optim", "nonfinite"}
    assert {"policy/entropy_p90", "text/repetition"} < full - gradients


# --- what is missing ---------------------------------------------------------------------------------


def test_what_cannot_be_measured_says_why_and_is_recorded_once():
    """By the beginning of the names; empty before the first step."""
    watcher, run = bare()
    assert watcher.unavailable == {}

    for step in (1, 2):
        watcher.observe(**batch())
        watcher.step(step, loss=0.5)

    reasons = watcher.unavailable
    assert reasons["policy/kl_ref"] == "never given: observe(ref_logp=)"
    assert reasons["policy/entropy"] == "never given: observe(entropy=) or observe(logits=)"
    assert reasons["ratio/clipfrac"] == "never given: Watcher(clip=)"
    assert reasons["grad_layer/"] == "never given: gradients()"
    assert "loss/" not in reasons
    assert "policy/logp" not in reasons
    assert [(e.kind, e.step, e.body["reasons"]) for e in run.events] == [("not_available", 1, reasons)]


def test_what_comes_later_is_available_then():
    """The reasons are of now."""
    watcher, _ = bare()
    watcher.observe(**batch())
    watcher.step(1)
    assert "policy/kl_ref" in watcher.unavailable
    watcher.observe(**batch(), ref_logp=torch.zeros(2, 3))
    watcher.step(2)

    assert "policy/kl_ref" not in watcher.unavailable


def test_a_level_a_refusal_and_an_empty_mask_are_reasons():
    """In their own words."""
    low, _ = bare(level="scalars")
    low.observe(**batch())
    low.step(1, loss=0.0)
    odd, _ = bare()
    odd.observe(**batch(), ref_logp=torch.zeros(5, 5))
    odd.step(1, loss=0.0)
    empty, _ = bare()
    empty.observe(logp=torch.zeros(2, 3), mask=torch.zeros(2, 3))
    empty.step(1, loss=0.0)

    assert low.unavailable["policy/logp"] == "level is 'scalars'; this begins with 'tokens'"
    assert odd.unavailable["policy/kl_ref"] == "ref_logp= was refused: it has shape (5, 5) where logp has (2, 3)"
    assert empty.unavailable["policy/logp"].startswith("there was nothing in it: no token inside a mask")


def test_a_loop_that_passes_everything_lacks_only_what_it_does_not_have():
    """One engine, so no mismatch."""
    assert set(train(watched(), steps=1).watcher.unavailable) == {"mismatch/"}


def test_every_subject_names_metrics_there_are():
    """A reason nobody can look up would help nobody."""
    names = [*BY_NAME, *(row.name for row in OPEN)]

    assert [start for start in SUBJECTS if not any(name.startswith(start) for name in names)] == []


# --- what does not fit -------------------------------------------------------------------------------


def test_a_misfit_is_warned_of_once_counted_always_and_never_raised(caplog):
    """With the shapes; the rest of the step is recorded."""
    watcher, run = bare()
    with caplog.at_level(logging.WARNING, logger="rlwatch"):
        for step in (1, 2, 3):
            watcher.observe(**batch(), ref_logp=torch.zeros(2, 4))
            watcher.rollouts(rewards=[1.0, 0.0], lengths=[3])
            watcher.step(step, loss=torch.zeros(2), note="text")

    assert [record.getMessage() for record in caplog.records] == [
        "rlwatch leaves out ref_logp= of observe (training goes on): it has shape (2, 4) where logp has (2, 3)",
        "rlwatch leaves out lengths= of rollouts (training goes on): it is of 1 responses where rewards is of 2",
        "rlwatch leaves out loss/raw= of step (training goes on): it is not one number: got shape (2,)",
        "rlwatch leaves out nonfinite/loss= of step (training goes on): it is not one number: got shape (2,)",
        "rlwatch leaves out note= of step (training goes on): it is not one number: got 'text'",
    ]
    assert run.counters["refused"] == 15
    assert run.counters["errors"] == 0
    assert all({"reward/mean", "policy/logp_mean"} < set(metrics) for metrics in run.steps.values())


def test_strict_raises_where_it_would_warn():
    """For trying a loop out."""
    watcher, _ = bare(strict=True)
    with pytest.raises(ConfigError, match=r"observe\(ref_logp=\): it has shape \(2, 4\) where logp has \(2, 3\)"):
        watcher.observe(**batch(), ref_logp=torch.zeros(2, 4))
    with pytest.raises(ConfigError, match=r"rollouts\(lengths=\): it is of 1 responses where rewards is of 2"):
        watcher.rollouts(rewards=[1.0, 0.0], lengths=[3])
    with pytest.raises(ConfigError, match=r"step\(x=\): it is not one number: got 'y'"):
        watcher.step(x="y")


def test_micro_batches_that_lack_something_lack_only_that():
    """One of two without a reference: its tokens count for everything else."""
    watcher, run = bare()
    one, two = batch(), batch()
    watcher.observe(**one, ref_logp=torch.zeros(2, 3), old_logp=one["logp"])
    watcher.observe(**two)
    watcher.step(1)
    every = torch.cat([one["logp"], two["logp"]]).mean().item()

    assert run.steps[1]["policy/logp_mean"] == pytest.approx(every)
    assert run.steps[1]["policy/kl_ref_k1"] == pytest.approx(one["logp"].mean().item())
    assert run.counters.snapshot() == {}


def test_empty_micro_batches_switch_nothing_off():
    """Any number of them: the next real one is measured."""
    watcher, run = bare()
    for _ in range(5):
        watcher.observe(logp=torch.zeros(0, 3), mask=torch.zeros(0, 3))
        watcher.observe(logp=[], advantages=[])
        watcher.rollouts(rewards=[], lengths=[])
    watcher.observe(**batch())
    watcher.step(1)

    assert "policy/logp_mean" in run.steps[1]
    assert "reward/mean" not in run.steps[1]
    assert run.counters["errors"] == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"model": "gpt"}, "model must be a torch.nn.Module, got str"),
        ({"ref_model": 3}, "ref_model must be a torch.nn.Module, got int"),
        ({"optimizer": 1e-3}, "optimizer must have param_groups, as torch.optim's do; got float"),
        ({"clip": "0.2"}, r"clip must be \(low, high\)"),
        ({"clip": (0.2, -0.1)}, r"clip must be \(low, high\)"),
        ({"dual_clip": 0}, "dual_clip must be a number above 0, got 0"),
        ({"truncation": True}, "truncation must be a number above 0, got True"),
        ({"temperature": -1.0}, "temperature must be a number above 0, got -1.0"),
        ({"level": "everything"}, "level must be one of scalars, tokens, gradients, full, got 'everything'"),
        ({"save": "checkpoint"}, "save must be a function, got 'checkpoint'"),
        ({"eos": "</s>"}, "eos must be a token id or a list of them, got '</s>'"),
        ({"text": True, "tokenizer": object()}, r"tokenizer must have decode\(ids\), got object"),
        ({"completions": 3}, "completions must be True, False or KeepCompletions"),
        ({"project": "x"}, "run= is given, so project= has no effect"),
    ],
)
def test_what_it_is_made_with_is_checked_at_once(kwargs, message):
    """Set-up errors are loud: what was wrong, what was got."""
    with pytest.raises(ConfigError, match=message):
        rlwatch.Watcher(**kwargs, run=FakeRun())


def test_a_reference_that_is_the_policy_is_no_reference():
    """Its KL would always be 0."""
    policy = Policy()
    with pytest.raises(ConfigError, match="ref_model is the policy itself"):
        rlwatch.Watcher(policy, ref_model=policy, run=FakeRun())


# --- the end -----------------------------------------------------------------------------------------


def test_a_run_of_its_own_is_made_recorded_and_finished(tmp_path):
    """As a context: what rlwatch.init takes goes there."""
    with rlwatch.Watcher(store=tmp_path, project="p", name="n", config={"lr": 1}, level="tokens") as watcher:
        watcher.observe(**batch())
        watcher.step(1, loss=0.5)
    store = open_store(str(tmp_path))
    (info,) = store.runs()

    assert (info.project, info.name, info.state.value, info.last_step) == ("p", "n", "finished", 1)
    assert "policy/logp_mean" in store.metric_names(info.run_id)
    assert [event.kind for event in store.events(info.run_id)] == ["not_available"]


def test_the_rank_is_that_of_the_process_group(monkeypatch):
    """Without an environment to read it from, as torch.multiprocessing starts processes; only rank 0 records."""
    for name, value in {"is_available": True, "is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)
    watcher = rlwatch.Watcher(store="memory://second-rank")
    watcher.step(1, loss=0.5)

    assert (watcher.run.rank, watcher.run.world_size) == (1, 2)
    assert not watcher.run.active
    assert open_store("memory://second-rank").runs() == []


def test_a_run_of_somebody_else_is_not_ended():
    """Whoever made it ends it."""
    with rlwatch.Watcher(run=(run := FakeRun())) as watcher:
        watcher.step(1)
    watcher.finish()

    assert run.ends == []


def test_an_exception_leaves_its_cause_and_the_half_of_its_step():
    """The loop's own exception goes on as it was."""
    run = FakeRun()

    def loop():
        with rlwatch.Watcher(run=run) as watcher:
            watcher.step(3, loss=0.5)
            watcher.observe(**batch())
            raise ZeroDivisionError("no tokens")

    with pytest.raises(ZeroDivisionError):
        loop()

    assert list(run.steps) == [3, 4]
    assert "policy/logp_mean" in run.steps[4]
    (event,) = [e for e in run.events if e.kind == "exception"]
    assert (event.step, event.body["error"]) == (3, "ZeroDivisionError: no tokens")
    assert event.body["where"].endswith("in loop")


def test_a_run_of_its_own_ends_as_crashed(tmp_path):
    """With the reason."""

    def loop():
        with rlwatch.Watcher(store=tmp_path) as watcher:
            watcher.step(1, loss=0.5)
            raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        loop()
    (info,) = open_store(str(tmp_path)).runs()

    assert (info.state.value, info.state_reason) == ("crashed", "RuntimeError: CUDA out of memory")


def test_a_run_that_does_not_record_costs_nothing():
    """After its end, and on ranks that send nothing."""
    run = FakeRun()
    run.active = False
    outcome = train(watched(run=run), steps=2)

    assert run.logged == []
    assert outcome.watcher.unavailable == {}


def test_what_is_in_flight_is_recorded_when_the_process_ends():
    """Without finish() too: the copy of the last step may still be under way."""
    from rlwatch.integrations.torch.attach import _deliver_at_exit

    watcher, run = bare()
    watcher.steps.tally.add_number("x", 1.0)
    watcher.steps.seal(1)
    _deliver_at_exit(lambda: watcher.steps)
    _deliver_at_exit(lambda: None)

    assert run.steps == {1: {"x": 1.0}}


@pytest.mark.usefixtures("behind")
def test_a_device_that_lags_is_waited_for_only_when_too_much_is_in_flight():
    """Nothing piles up without bound."""
    from rlwatch.integrations.torch import taps as steps_module

    watcher, run = bare()
    for step in range(1, 12):
        watcher.step(step)

    assert list(run.steps) == list(range(1, 12 - steps_module.IN_FLIGHT))
    watcher.finish()
    assert list(run.steps) == list(range(1, 12))


def test_the_step_goes_on_counting_where_a_checkpoint_was_written():
    """And another run says where it came from."""
    watcher, _ = bare()
    watcher.step(41)
    state = watcher.state_dict()
    again, run = bare()
    run.info = type(run.info)("other")
    again.load_state_dict(state)
    again.step()

    assert state == {"format": 1, "step": 41, "run_id": "r"}
    assert list(run.steps) == [42]
    assert [(e.kind, e.body) for e in run.events if e.kind == "resume"] == [("resume", {"from_run": "r"})]


@pytest.mark.parametrize("state", [{}, {"format": 9, "step": 1}, {"format": 1, "step": "x"}])
def test_a_state_that_is_none_is_refused(state):
    """Steps are counted on from where they are."""
    watcher, run = bare()
    watcher.load_state_dict(state)

    assert run.counters["refused"] == 1
    assert watcher.state_dict()["step"] == 0


def test_settings_come_by_name_or_as_one_object_and_a_name_takes_precedence():
    """Both are the same settings, and ``help()`` lists all of them."""
    settings = WatcherSettings(clip=0.2, level="tokens", strict=True)
    watcher = rlwatch.Watcher(run=FakeRun(), settings=settings, level="scalars")

    assert watcher.unavailable == {}
    watcher.step(1, loss=0.5)
    assert watcher.unavailable["policy/entropy"] == "level is 'scalars'; this begins with 'tokens'"
    with pytest.raises(ConfigError, match="rewards"):
        watcher.rollouts(rewards=object())
    assert {"clip", "adjustable", "run", "init_arguments"} <= set(inspect.signature(rlwatch.Watcher).parameters)
    with pytest.raises(ConfigError, match="save must be a function"):
        WatcherSettings(save="no function")
