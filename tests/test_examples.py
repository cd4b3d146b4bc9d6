"""Every example runs, and leaves the run it promises."""

from pathlib import Path

import numpy as np
import pytest
from preloaded import run_program

from rlwatch.records import Severity
from rlwatch.state import State
from rlwatch.store.url import open_store
from rlwatch.view import stored_diagnosis, stored_verdict

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "layer_clip.py": ["--steps", "60"],
    "nan_at_padding.py": ["--steps", "30"],
    "own_loop.py": ["--steps", "30", "--reset-at", "10"],
    "scalars.py": ["--steps", "200"],
    "stale_weights.py": ["--steps", "60"],
    "tee_wandb.py": ["--steps", "60"],
    "top_p_bias.py": ["--steps", "50"],
    "transformers_trainer.py": ["--steps", "5"],
    "trl_canaries.py": ["--steps", "24"],
    "trl_grpo.py": ["--steps", "3"],
    "trl_peft.py": ["--steps", "4"],
}
COLLAPSES = {"nan_at_padding.py", "stale_weights.py", "tee_wandb.py", "top_p_bias.py", "trl_canaries.py"}
"""Those that fail on purpose."""
NOT_JUDGED = {"transformers_trainer.py", "trl_grpo.py", "trl_peft.py"}
"""Those that log no reward, or are played for a few steps only."""


def test_every_example_is_run_here():
    """A new example without arguments fails this test, not its first reader."""
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(ARGUMENTS)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Runs the example of a name, once: the process that has ended, and its store."""
    known = {}

    def play(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            out = run_program(None, "--store", folder / "runs", *ARGUMENTS[name], script=EXAMPLES / name, cwd=folder)
            known[name] = out, open_store(str(folder / "runs"))
        return known[name]

    return play


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_example_runs_and_records(name, played):
    """As its first lines say."""
    out, store = played(name)

    assert out.returncode == 0, out.stderr[-2000:]
    (stored,) = store.runs()
    assert stored.run_id in out.stdout
    assert stored.last_step is not None
    assert stored.last_step >= int(ARGUMENTS[name][1]) - 1


@pytest.mark.torch
def test_the_own_loop_is_reset_by_another_process_while_it_runs(played):
    """KL to the reference is 0 at the step after the one the answer names."""
    out, store = played("own_loop.py")
    (stored,) = store.runs()
    (event,) = [event for event in store.events(stored.run_id) if event.kind == "reference_reset"]
    series = store.series(stored.run_id, ["policy/kl_ref_k3"])["policy/kl_ref_k3"]
    kl = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))

    assert f"reset-reference done at step {event.step}" in out.stdout
    assert kl[event.step] > 1e-4
    assert event.step == stored.last_step or kl[event.step + 1] < 1e-6


@pytest.mark.torch
def test_what_the_mirrored_training_collapsed_of_is_told_to_wandb(played):
    """The example promises an alert."""
    _, store = played("tee_wandb.py")
    (stored,) = store.runs()

    assert (stored.project, stored.name) == ("examples", "collapse")
    assert "entropy_collapse" in {alert.kind for alert in store.alerts(stored.run_id) if alert.state == "firing"}


@pytest.mark.torch
def test_the_verifier_that_crashed_to_full_marks_is_named_as_the_cause(played):
    """By the canary that it gave away, from the step at which its sandbox died."""
    out, store = played("trl_canaries.py")
    (stored,) = store.runs()
    (changed,) = [found for found in store.findings(stored.run_id) if found.kind == "verifier_changed"]
    first = stored_diagnosis(store, stored).causes[0]

    assert (changed.severity, changed.metric) == (Severity.CRITICAL, "verifier/canary_wrong/sandboxed/wrong1")
    assert 13 <= changed.onset_step <= 15
    assert (first.kind, first.knob) == ("verifier_changed", "environment")
    assert f"found: {changed.message}" in out.stdout


@pytest.mark.torch
def test_infinite_padding_is_named_as_the_source_of_a_nan_gradient(played):
    """In the step in which it begins, while the loss stays finite."""
    out, store = played("nan_at_padding.py")
    (stored,) = store.runs()
    (found,) = [found for found in store.findings(stored.run_id) if found.severity is Severity.CRITICAL]
    loss = store.series(stored.run_id, ["loss/raw"])["loss/raw"]

    assert (found.kind, found.onset_step) == ("nonfinite", 16)
    assert "only padding is not finite: old_logp at slot" in found.message
    assert (len(loss.values), np.isfinite(loss.values).all()) == (30, True)
    assert f"found: {found.message}" in out.stdout


@pytest.mark.torch
def test_truncated_sampling_is_named_as_the_cause_of_a_mismatch(played):
    """By the shape of the gap, from the step at which the engine was set so."""
    out, store = played("top_p_bias.py")
    (stored,) = store.runs()
    first = stored_diagnosis(store, stored).causes[0]

    assert first.mismatch == "truncated sampling"
    assert "truncated sampling (" in out.stdout
    assert "the trainer-engine mismatch grew from step 26" in out.stdout


@pytest.mark.torch
def test_weights_that_do_not_arrive_are_named_at_the_first_sync_that_fails(played):
    """Before the gap of the log-probs is large enough to be one."""
    out, store = played("stale_weights.py")
    (stored,) = store.runs()
    told = [found for found in store.findings(stored.run_id) if found.kind == "weights_differ"]
    first = stored_diagnosis(store, stored).causes[0]

    assert (told[0].step, told[0].onset_step) == (31, 31)
    assert "in every layer" in told[0].message
    assert "equal last at step 30" in told[0].message
    assert (first.kind, first.knob) == ("weights_differ", "weight_sync")
    assert f"found: {told[0].message}" in out.stdout


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(ARGUMENTS.keys() - COLLAPSES))
def test_an_example_is_said_to_be_healthy(name, played):
    """They are sound trainings: nothing worse than a remark, no alert, no cause, or too short or without a reward."""
    _, store = played(name)
    (stored,) = store.runs()
    loud = [found.message for found in store.findings(stored.run_id) if found.severity is not Severity.INFO]
    verdict = stored_verdict(store, stored)

    assert loud == []
    assert [alert.message for alert in store.alerts(stored.run_id)] == []
    assert stored_diagnosis(store, stored).causes == ()
    assert verdict.state is (State.NOT_JUDGED if name in NOT_JUDGED else State.HEALTHY), verdict.text


AT_A_LEVEL = """
import functools, runpy, sys, rlwatch
rlwatch.Watcher = functools.partial(rlwatch.Watcher, level=sys.argv.pop(1))
runpy.run_path(sys.argv[0] if len(sys.argv) < 2 else sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.torch
@pytest.mark.parametrize("level", ["scalars", "tokens", "gradients"])
def test_a_sound_loop_is_said_to_be_healthy_at_every_level(level, tmp_path):
    """The same loop, however little is measured; at ``full`` it is an example above."""
    out = run_program(AT_A_LEVEL, level, EXAMPLES / "own_loop.py", "--steps", "60", "--store", tmp_path, cwd=tmp_path)
    assert out.returncode == 0, out.stderr[-2000:]
    store = open_store(str(tmp_path))
    (stored,) = store.runs()
    verdict = stored_verdict(store, stored)

    assert verdict.state is State.HEALTHY, verdict.text
    assert [f.message for f in store.findings(stored.run_id) if f.severity is not Severity.INFO] == []
    assert stored_diagnosis(store, stored).causes == ()
