"""All of it for real but the GPUs: verl's trainer, two Ray workers, FSDP2, TransferQueue, Tracking, and our commands.

One run of the example, 5 steps at most; a person asks for a reset, a checkpoint, a lower rate, another KL weight, the end.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlwatch.records import CULPRITS, LOCALISED, CommandStatus, RunState
from rlwatch.store.url import open_store

TRAIN = Path(__file__).parents[2] / "examples" / "verl_grpo" / "cpu" / "train.py"
RESET, LOWER, LAST = 2, 3, 4
COMMANDS = [
    f"{RESET}:reset-reference", f"{LOWER}:save-checkpoint", f"{LOWER}:lower-lr:scale=0.5",
    f"{LAST}:set-kl-coef:value=0.01", f"{LAST}:stop",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the run was recorded and worked, and what the training printed."""
    folder = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, str(TRAIN), "--workers", "2", "--steps", "5", "--store", "runs", "--work", "work"]
    command += [part for text in COMMANDS for part in ("--command", text)]
    command += [
        "+trainer.rlwatch.completions={every:2,rows:3}",
        "+trainer.rlwatch.localise={threshold:1e-9,culprits:1,share:0.9,allowance_s:3600}",
    ]
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(folder / "state")}

    out = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )

    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:] + last_words(out.stderr)
    return folder, out.stdout


def last_words(errors):
    """Last lines of a worker that died, native stack and all, which the driver's own errors push out of sight."""
    dead = re.search(r"Worker PID: (\d+)", errors)
    said = [line for line in errors.splitlines() if dead and f"pid={dead[1]}" in line]
    return "\n".join(["", f"last words of worker {dead[1]}:", *said[-80:]]) if dead else ""


@pytest.fixture(scope="module")
def run(trained):
    store = open_store(str(trained[0] / "runs"))
    (run,) = store.runs()
    steps = {}
    for record in store.records(run.run_id):
        steps.setdefault(record.step, {}).update(record.metrics)
    return run, steps, store


def events(run, kind):
    info, _, store = run
    return [event for event in store.events(info.run_id) if event.kind == kind]


def test_the_run_ended_where_it_was_told_to(run):
    """verl's loop ended in good order, one step early, and so did the run."""
    info, steps, _ = run

    assert (info.state, info.source, info.last_step) == (RunState.FINISHED, "verl", LAST)
    assert sorted(steps) == [1, 2, 3, 4]


def test_no_error_was_swallowed(run):
    """Neither on the driver nor in a worker."""
    _, steps, _ = run

    assert not [step for step in steps.values() if step.get("rlwatch/errors") or step.get("rlwatch/dropped")]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("policy/entropy", "actor/entropy"), ("reward/mean", "critic/score/mean"), ("reward/max", "critic/score/max"),
        ("len/mean", "response_length/mean"), ("adv/mean", "critic/advantages/mean"), ("mismatch/kl", "rollout_corr/kl"),
        ("staleness/mean", "training/off_policy/trajectory_staleness/mean"),
    ],
)  # fmt: skip
def test_the_batch_is_the_one_verl_sees(run, ours, theirs):
    """Read from the TransferQueue before verl drops it: what verl computes of it too is the same number."""
    _, steps, _ = run

    for step in steps.values():
        assert step[ours] == pytest.approx(step[theirs], rel=1e-4, abs=1e-6)


def test_the_update_is_measured_on_both_workers(run):
    """Sharded gradients of two ranks make whole layers; ratios of both are one statistic."""
    _, steps, _ = run

    for step in steps.values():
        layers = [value for name, value in step.items() if name.startswith("grad_layer/")]
        assert math.sqrt(sum(value**2 for value in layers)) == pytest.approx(step["optim/grad_norm"], rel=1e-4)
        assert step["optim/grad_norm_max"] >= step["actor/grad_norm"] * (1 - 1e-6)
        # verl averages micro-batches, this is the mean over tokens: near zero they agree in size only
        assert step["policy/kl_old"] == pytest.approx(step["actor/ppo_kl"], abs=2e-2)
        assert step["policy/vocab_size"] == 16


def test_tasks_and_groups_are_distinguished(run):
    """By verl's ``data_source`` and ``uid``."""
    _, steps, _ = run

    assert {"reward/by_task/even_rows", "reward/by_task/odd_rows"} <= steps[1].keys()
    assert 0 <= steps[1]["reward/zero_std_frac"] <= 1


def test_completions_are_kept_as_text(run):
    """Where that was asked for: prompts of the dataset, responses over the same digits, with verl's own score."""
    info, steps, store = run
    kept = store.completions(info.run_id)

    assert [batch.step for batch in kept] == [1, 3]
    assert all(re.fullmatch(r"\d{3}=", prompt) for batch in kept for prompt in batch.columns["prompt"])
    assert all(len(said) for batch in kept for said in batch.columns["completion"])
    assert [max(batch.columns["reward"]) for batch in kept] == pytest.approx(
        [steps[batch.step]["critic/score/max"] for batch in kept]
    )


def test_every_optimizer_step_was_localised(run):
    """By both workers together, told once by the driver: several steps of each global step, with culprits and why."""
    info, steps, store = run
    told = events(run, LOCALISED)
    culprits = [batch for batch in store.spikes(info.run_id) if batch.reason == CULPRITS]

    assert {event.step for event in told} == steps.keys()
    assert len(told) > len(steps)
    for event in told:
        assert event.body["complete"] or event.body["why_not"], event.body
    assert {batch.step for batch in culprits} <= steps.keys()
    assert {batch.rank for batch in culprits} <= {0, 1}
    # Which tokens are worth a backward pass of their own depends on the batch, and sampling is not the same twice.
    assert all(batch.columns["verified"].any() for batch in culprits)
    assert all(((batch.columns["own_norm"] > 0) == (batch.columns["verified"] > 0)).all() for batch in culprits)


def test_text_is_measured_without_being_kept(run):
    """A report on a few responses every half a minute, in the record of a later step."""
    _, steps, _ = run

    assert any("text/retok_exact" in step for step in steps.values())


def test_kl_starts_again_from_zero_after_the_reset(run):
    """At the very next step, exactly: the reference is the policy. Then it grows again."""
    _, steps, _ = run

    assert steps[RESET]["policy/kl_ref_k3"] > 0
    assert steps[RESET + 1]["policy/kl_ref_k3"] == 0.0
    assert steps[RESET + 2]["policy/kl_ref_k3"] > 0


def test_every_command_was_carried_out_at_its_step(run):
    """And answered; of the reset it is told which KL its own step had."""
    info, steps, store = run

    assert {c.kind: c.status for c in store.commands(info.run_id)} == dict.fromkeys(
        ["reset-reference", "save-checkpoint", "lower-lr", "set-kl-coef", "stop"], CommandStatus.DONE
    )
    (reset,) = events(run, "reference_reset")
    assert reset.body["kl_before"] == steps[RESET]["policy/kl_ref_k3"]
    assert (reset.step, reset.body["exact"], reset.body["ranks"], reset.body["cleared"]) == (RESET, True, 2, 26)
    assert [event.step for event in events(run, "command")] == [LOWER, LOWER, LAST, LAST]


def test_what_was_set_shows_in_verls_own_log(run):
    """The rate at the step after; the coefficient would at the next."""
    _, steps, _ = run

    assert steps[LOWER + 1]["actor/lr"] == pytest.approx(steps[LOWER]["actor/lr"] / 2)


@pytest.mark.parametrize("step", [LOWER, LAST])
def test_checkpoints_hold_the_reference_of_both_ranks(trained, step):
    """Beside the actor's shards, with what it is."""
    kept = trained[0] / "work" / "checkpoints" / f"global_step_{step}" / "actor" / "rlwatch_reference"

    shards = ["world_size_2_rank_0.pt", "world_size_2_rank_1.pt"]
    assert sorted(path.name for path in kept.iterdir()) == ["reference.json", *shards]


def test_driver_and_workers_left_their_heartbeats(trained):
    """The doctor hears them."""
    environment = {**os.environ, "RLWATCH_STATE_DIR": str(trained[0] / "state")}
    command = [sys.executable, "-m", "rlwatch.cli", "doctor", "--store", str(trained[0] / "runs")]

    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert "watched as worker" in out.stdout
    assert "watched as driver" in " ".join(out.stdout.split())


def test_verl_logs_to_the_console_as_ever(trained):
    """Our backend beside its own."""
    assert f"step:{LAST} - " in trained[1]
