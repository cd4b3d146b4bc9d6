"""A reset survives the process: kept in TRL's checkpoints, taken up on a resume, once and exactly."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_trl import FakeRun, make_trainer, model_on_disk
from transformers import TrainerCallback

from rlwatch.detectors.trust_region.reference_continuity import ReferenceContinuity
from rlwatch.integrations.checkpoints import ReferenceFacts, write_reference
from rlwatch.integrations.trl import watch
from rlwatch.records import ClosedStep, Command

pytestmark = pytest.mark.torch
KL = ("policy/kl_ref_k1", "policy/kl_ref_k2", "policy/kl_ref_k3")
ADAPTER = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)


class After(TrainerCallback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def trained(tmp_path, *, reset_at=2, resume=None, optimizer="keep", before=None, send=None, adapted=False, **config):
    """Train to step 6 with a checkpoint every second step; a command is sent at the end of step ``reset_at``."""
    defaults = {"beta": 0.1, "max_steps": 6, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 2}
    if adapted:
        base = model_on_disk(tmp_path / "base")
        defaults |= {"model": get_peft_model(base, ADAPTER)}
    trainer, run = make_trainer(tmp_path, **{**defaults, **config}), FakeRun()
    ask = (lambda run: run.send(optimizer=optimizer)) if send is None else send
    trainer.add_callback(After(reset_at, lambda: ask(run)))
    watch(trainer, run=run)
    if before is not None:
        before(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, run


@cache
def _once(**config):
    """The same for all tests of this process; what it wrote must not be changed."""
    folder = TemporaryDirectory(prefix="rlwatch-first-")
    return folder, trained(Path(folder.name), **config)


def trained_once(tmp_path, **config):
    """``trained``, with the checkpoints of a training that went before as if it had been made in ``tmp_path``."""
    folder, (trainer, run) = _once(**config)
    shutil.copytree(Path(folder.name) / "out", tmp_path / "out")
    return trainer, run


def kept(tmp_path):
    return sorted(path.parent.name for path in (tmp_path / "out").glob("checkpoint-*/rlwatch_reference"))


def events(run, *kinds):
    return [(event.kind, event.step) for event in run.events if event.kind in kinds or not kinds]


def kl(run, step):
    return [run.taps()[step][name] for name in KL]


@pytest.mark.parametrize("adapted", [False, True], ids=["whole model", "adapter"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, adapted):
    """KL of every later step and the final weights, bit for bit: the reset is neither lost nor repeated."""
    whole, straight = trained(tmp_path, adapted=True) if adapted else trained_once(tmp_path)
    trainer, resumed = trained(tmp_path, adapted=adapted, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-4"))

    assert kept(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert max(kl(straight, 3)) < 1e-9
    assert min(kl(straight, 5)[1:]) > 1e-6
    assert [kl(resumed, step) for step in (5, 6)] == [kl(straight, step) for step in (5, 6)]
    pairs = zip(trainer.model.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert events(resumed) == [("reference_restored", 4)]
    body = resumed.events[0].body
    assert (body["reset_step"], body["id"]) == (2, "c1")
    assert body["fingerprint"] == straight.events[0].body["fingerprint"]


def test_without_keeping_it_the_reset_would_be_lost(tmp_path):
    """What the test above can tell: the trainer alone is anchored to the old reference again."""
    _, straight = trained_once(tmp_path)
    for path in (tmp_path / "out").glob("**/rlwatch_reference"):
        shutil.rmtree(path)
    _, resumed = trained(tmp_path, reset_at=99, resume=True, max_steps=7)

    assert kl(resumed, 7)[2] > 2 * kl(straight, 6)[2]


def test_a_checkpoint_from_before_the_reset_does_not_have_it_and_says_so(tmp_path):
    """The step was undone with everything after it, and so is what the later checkpoints held."""
    _, straight = trained(tmp_path, reset_at=4)
    _, resumed = trained(tmp_path, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-2"))
    _, plain = trained(tmp_path / "b", reset_at=99)

    assert kept(tmp_path) == []
    assert events(resumed) == [("reference_not_restored", 2)]
    assert resumed.events[0].body["reason"] == (
        "the reset at step 4 came after this checkpoint and is undone by resuming from it"
    )
    assert kl(resumed, 6) == kl(plain, 6) != kl(straight, 6)


def test_the_last_of_two_resets_is_the_one_that_is_kept(tmp_path):
    """And a resume from between them has the first."""
    _, straight = make_trainer_with_two_resets(tmp_path)
    _, resumed = trained(tmp_path, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-4"))
    _, between = trained(tmp_path, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-2"), max_steps=4)

    assert [e.step for e in straight.events] == [1, 4]
    assert kl(resumed, 6) == kl(straight, 6)
    assert resumed.events[0].body["reset_step"] == 4
    assert between.events[0].body["reset_step"] == 1
    assert kl(between, 4) == kl(straight, 4)


def make_trainer_with_two_resets(tmp_path):
    config = {"beta": 0.1, "max_steps": 6, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 2}
    trainer, run = make_trainer(tmp_path, **config), FakeRun()
    for step in (1, 4):
        trainer.add_callback(After(step, lambda: run.send(optimizer="keep")))
    watch(trainer, run=run)
    trainer.train()
    return trainer, run


def test_a_resume_keeps_on_keeping(tmp_path):
    """The checkpoints of the second process hold it too, and a third process finds it there."""
    trained(tmp_path, max_steps=4)
    trained(tmp_path, reset_at=99, resume=True, max_steps=6)
    _, third = trained(tmp_path, reset_at=99, resume=True, max_steps=8)
    _, once = trained(tmp_path / "b", max_steps=8)

    assert kept(tmp_path) == [f"checkpoint-{n}" for n in (2, 4, 6, 8)]
    assert kl(third, 8) == kl(once, 8)
    assert third.events[0].body["reset_step"] == 2


def test_checkpoints_share_one_file_until_the_next_reset(tmp_path):
    """A reference as large as the model is written once, not with every checkpoint."""
    make_trainer_with_two_resets(tmp_path)
    files = [tmp_path / "out" / f"checkpoint-{n}" / "rlwatch_reference" / "reference.safetensors" for n in (2, 4, 6)]
    first, second, third = (path.stat().st_ino for path in files)

    assert second == third != first
    facts = json.loads((files[2].parent / "reference.json").read_text())
    assert (facts["step"], facts["command"], facts["by"], facts["why"]) == (4, "c1", "ann@lab", "KL saturated")


def test_what_is_kept_is_the_reference_by_the_names_of_the_model(tmp_path):
    """Readable by anybody."""
    trainer, _ = trained_once(tmp_path)
    tensors = load_file(tmp_path / "out" / "checkpoint-6" / "rlwatch_reference" / "reference.safetensors")
    reference = dict(trainer.ref_model.named_parameters())

    assert tensors.keys() == reference.keys()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in tensors.items())


def test_without_a_reset_nothing_is_written(tmp_path):
    """Checkpoints are TRL's own, and a resume is silent."""
    trained(tmp_path, reset_at=99, max_steps=4)
    _, resumed = trained(tmp_path, reset_at=99, resume=True)

    assert list((tmp_path / "out").glob("**/rlwatch_reference")) == []
    assert resumed.events == []


def test_rotated_checkpoints_take_nothing_with_them(tmp_path):
    """With one checkpoint kept, the last one holds the reference."""
    trained(tmp_path, save_total_limit=1)
    assert kept(tmp_path) == ["checkpoint-6"]
    _, resumed = trained(tmp_path, reset_at=99, resume=True, max_steps=7)
    assert events(resumed) == [("reference_restored", 6)]


DAMAGE = {
    "garbled": (lambda p: p.write_bytes(p.read_bytes()[:-4] + b"\0\1\2\3"), "damaged"),
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[:100]), "damaged"),
    "missing": (lambda p: p.unlink(), "cannot be read"),
    "no facts": (lambda p: (p.parent / "reference.json").unlink(), "cannot be read"),
    "facts of the future": (
        lambda p: (p.parent / "reference.json").write_text('{"step": 2, "format": 9}'),
        "of a format (9)",
    ),
    "facts that are none": (lambda p: (p.parent / "reference.json").write_text("[1, 2"), "cannot be read"),
}


ONE_OF_A_KIND = ("garbled", "missing", "facts of the future")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in ONE_OF_A_KIND else pytest.mark.thorough) for name in DAMAGE]
)
def test_a_damaged_file_is_one_warning_and_an_event(tmp_path, caplog, damage):
    """Training goes on with the reference the trainer built."""
    trained_once(tmp_path, max_steps=2)
    path = tmp_path / "out" / "checkpoint-2" / "rlwatch_reference" / "reference.safetensors"
    spoil, words = DAMAGE[damage]
    copy = path.read_bytes()
    path.unlink()  # checkpoints share the file
    path.write_bytes(copy)
    spoil(path)
    trainer, run = trained(tmp_path, reset_at=99, resume=True, max_steps=4)
    warnings = [record.message for record in caplog.records if "take up a reference" in record.message]

    assert trainer.state.global_step == 4
    assert events(run) == [("reference_not_restored", 2)]
    assert words in run.events[0].body["reason"]
    assert len(warnings) == 1
    assert run.counters.snapshot() == {}


def test_a_reference_of_another_model_is_refused_whole(tmp_path):
    """Nothing of it is copied."""
    trained_once(tmp_path, max_steps=2)
    parent = tmp_path / "out" / "checkpoint-2" / "rlwatch_reference"
    tensors = load_file(parent / "reference.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    write_reference(parent.parent, ReferenceFacts(2), tensors)
    trainer, run = trained(tmp_path, reset_at=99, resume=True, max_steps=3)

    assert run.events[0].body["reason"] == "the kept reference is of another model: 'model.norm.weight' differs"
    assert trainer.state.global_step == 3


def test_a_full_disk_costs_the_reference_and_nothing_else(tmp_path, monkeypatch, caplog):
    """One warning, an event, no half-written directory; the next checkpoint tries again."""
    from rlwatch.integrations import checkpoints as files

    original, calls = files.json.dumps, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return original(*args, **kwargs)

    monkeypatch.setattr(files, "json", type("J", (), {"dumps": staticmethod(full), "loads": json.loads}))
    trainer, run = trained(tmp_path)

    assert trainer.state.global_step == 6
    assert events(run) == [("reference_reset", 2), ("reference_not_kept", 2)]
    assert "No space left on device" in run.events[1].body["reason"]
    assert kept(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    assert list((tmp_path / "out").glob("**/.rlwatch_reference*")) == []


def test_a_reset_that_a_checkpoint_beside_knows_of_is_missed(tmp_path):
    """A process that died between saving a checkpoint and keeping the reference with it."""
    trained_once(tmp_path)
    shutil.rmtree(tmp_path / "out" / "checkpoint-6" / "rlwatch_reference")
    _, run = trained(tmp_path, reset_at=99, resume=True, max_steps=7)

    assert events(run) == [("reference_not_restored", 6)]
    assert (
        run.events[0]
        .body["reason"]
        .startswith("the reset at step 2, which checkpoint-2 holds, is not in this checkpoint: it is lost")
    )


def test_a_lowered_rate_outlives_the_process(tmp_path):
    """Scale and limit come back with the optimizer and the schedule: the same rates as without the interruption."""

    def lower(run):
        run.queue.append(Command("c5", "r1", "lower-lr", {"scale": 0.1, "until": 6}))

    config = {"lr_scheduler_type": "linear", "max_steps": 8}
    _, straight = trained(tmp_path, send=lower, **config)
    _, resumed = trained(tmp_path, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-4"), **config)
    rates = [{s: row["learning_rate"] for s, row in run.rows().items() if s > 4} for run in (straight, resumed)]

    assert rates[0] == rates[1]
    assert rates[0][7] > 2 * rates[0][6]


def test_the_path_may_be_given_in_every_way_the_trainer_takes_it(tmp_path):
    """As a path elsewhere, positionally, or True."""
    trained_once(tmp_path, max_steps=2)
    elsewhere = Path(shutil.copytree(tmp_path / "out" / "checkpoint-2", tmp_path / "copy"))
    for given in (elsewhere, True):
        trainer, run = make_trainer(tmp_path, beta=0.1, max_steps=3), FakeRun()
        watch(trainer, run=run)
        trainer.train(str(given) if given is not True else True)
        assert events(run) == [("reference_restored", 2)]


def set_beta(run):
    run.queue.append(Command("c7", "r1", "set-kl-coef", {"value": 5.0}))


def test_a_kl_coefficient_that_was_set_outlives_the_process(tmp_path):
    """The trainer starts with the configured one; the checkpoint knows better."""
    trained(tmp_path, send=set_beta, max_steps=4)
    trainer, resumed = trained(tmp_path, reset_at=99, resume=True)
    _, before = trained(tmp_path / "b", reset_at=99, max_steps=4)

    assert trainer.beta == 5.0
    assert resumed.taps()[5]["policy/kl_coef"] == 5.0
    (event,) = resumed.events
    assert (event.kind, event.step, event.body["command"], event.body["by"]) == ("command", 4, "set-kl-coef", "rlwatch")
    assert list((tmp_path / "b" / "out").glob("**/rlwatch_control.json")) == []
    assert before.events == []


def test_a_coefficient_that_was_undone_is_kept_no_longer(tmp_path):
    """The branch that never set it overwrites the checkpoints of the one that did."""
    trained(tmp_path, send=set_beta, reset_at=4)
    trained(tmp_path, reset_at=99, resume=str(tmp_path / "out" / "checkpoint-2"))

    assert list((tmp_path / "out").glob("**/rlwatch_control.json")) == []


MORE_THAT_IS_NONE = ['{"kl_coef": "much"}', "[]", '{"kl_coef": -1}']


@pytest.mark.parametrize(
    "content",
    ["{", '{"kl_coef": NaN}', *(pytest.param(text, marks=pytest.mark.thorough) for text in MORE_THAT_IS_NONE)],
)
def test_a_kept_coefficient_that_is_none_is_not_set(tmp_path, content):
    """The configured one stays."""
    trained_once(tmp_path, send=set_beta, max_steps=2, reset_at=1)
    (tmp_path / "out" / "checkpoint-2" / "rlwatch_control.json").write_text(content)
    trainer, resumed = trained(tmp_path, reset_at=99, resume=True, max_steps=3)

    assert (trainer.beta, resumed.events) == (0.1, [])


def judged(*runs):
    """What the detector says of the recorded KL of attempts, one after the other."""
    detector, found = ReferenceContinuity(), []
    for attempt, run in enumerate(runs, start=1):
        happened = {event.step: event for event in run.events}
        for step, metrics in sorted(run.taps().items()):
            found += [f.kind for f in detector.update(ClosedStep(step, metrics, attempt=attempt))]
            if step in happened:
                detector.notice(happened[step])
    return list(dict.fromkeys(found))


def test_the_detector_tells_a_silent_reset_from_an_announced_one_in_real_training(tmp_path):
    """The same weights are copied, once by command and once behind our back."""
    config = {"learning_rate": 1e-2, "beta": 0.001, "max_steps": 24, "reset_at": 16, "save_strategy": "no"}

    def behind_our_back(trainer):
        def copy():
            with torch.no_grad():
                for ours, theirs in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
                    theirs.copy_(ours)

        trainer.add_callback(After(16, copy))

    _, announced = trained(tmp_path / "a", **config)
    _, silent = trained(tmp_path / "b", before=behind_our_back, **{**config, "reset_at": 99})

    assert kl(announced, 16)[2] > 0.01
    assert judged(announced) == []
    assert judged(silent) == ["silent_reference_reset"]


def test_the_detector_notices_a_reset_that_was_really_lost(tmp_path):
    """The kept files are gone: TRL is anchored to its old reference again."""
    config = {"learning_rate": 1e-2, "beta": 0.001, "reset_at": 14, "save_steps": 16}
    _, first = trained(tmp_path, max_steps=16, **config)
    for path in (tmp_path / "out").glob("**/rlwatch_reference"):
        shutil.rmtree(path)
    _, second = trained(tmp_path, resume=True, max_steps=20, **{**config, "reset_at": 99})

    assert judged(first, second) == ["lost_reference_reset"]
