"""Repositories as Aim's own SDK writes them; collected by ``make nightly`` only."""

import math
import subprocess
import sys
import time

import aim
import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, logs_in, read_log

QUIET = {"system_tracking_interval": None, "capture_terminal_logs": False}
KL = [0.0, 0.5, math.nan, math.inf, -math.inf]
HPARAMS = {"lr": 1e-6, "layers": [1, 2], "optim": {"name": "adamw"}, "warmup": None}
TRAINER = """
import sys, aim
run = aim.Run(repo=sys.argv[1], system_tracking_interval=None, capture_terminal_logs=False)
run.name = "live"
for step in range(int(sys.argv[2])):
    run.track({f"m{n}": step + n for n in range(20)} | {"reward": step / 10}, step=step, context={"subset": "train"})
    if step % 50 == 49:
        run.track(0.5, name="reward", step=step - 40, context={"subset": "eval"})
run.close()
"""


def new_run(place, name, rewards=(0.1, 0.2, 0.3, 0.4, 0.5), **options):
    """A run of five steps that is still open."""
    run = aim.Run(repo=str(place), experiment="math-rl", **QUIET | options)
    run.name = name
    run["hparams"], run["model"] = HPARAMS, "qwen"
    run.add_tag("grpo")
    for step, (reward, kl) in enumerate(zip(rewards, KL, strict=True), 1):
        run.track(reward, name="reward", step=step, epoch=step / 10, context={"subset": "train"})
        run.track({"kl": kl, "length": 7}, step=step)
    return run


def values(run, name):
    """Those of one metric, as texts, for NaN."""
    return [repr(record.metrics[name]) for record in run.records if name in record.metrics]


def state(directory):
    """Of every file: when it was written, and its size."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.rglob("*")}


def test_every_run_is_read_with_all_that_was_said_of_it(tmp_path):
    """Contexts apart, epochs and moments along, and nothing of the machine, of texts or of archived runs."""
    began = time.time()
    done, again, hidden = (new_run(tmp_path, name) for name in ("s1", "s1", "hidden"))
    for step in (2, 4):
        done.track(0.25, name="reward", step=step, context={"subset": "val"})
        done.track(0.75, name="reward", step=step, context={"subset": "train", "rank": 1})
    done.track(9, name="length", step=5, context={"subset": "train"})  # as AimCallback names the mean of a run
    done.track(aim.Text("an answer"), name="sample", step=1)
    done.track(55.0, name="__system__cpu", step=9)
    done.track(0.9, name="reward", step=5, context={"subset": "train"})  # again, and the last word
    hidden.archived = True
    done.close()
    before = state(tmp_path)
    first, second = read_log(tmp_path)

    assert state(tmp_path) == before
    assert (first.name, second.name, second.title) == ("s1", f"s1-{again.hash[:8]}", f"s1-{again.hash[:8]}")
    assert (first.format, first.project, first.tags) == ("aim", "math-rl", ("grpo",))
    assert first.config == second.config == HPARAMS | {"model": "qwen"}
    assert [record.step for record in first.records] == [1, 2, 3, 4, 5]
    assert values(first, "kl") == list(map(repr, KL))
    assert values(first, "reward") == ["0.1", "0.2", "0.3", "0.4", "0.9"]
    assert values(second, "epoch") == ["0.1", "0.2", "0.3", "0.4", "0.5"]
    assert first.records[1].metrics["val/reward"] == 0.25
    assert first.records[3].metrics["reward[rank=1]"] == 0.75
    names = {name for record in first.records for name in record.metrics}
    assert names == {"reward", "val/reward", "reward[rank=1]", "kl", "length", "length[subset=train]", "epoch"}
    assert values(first, "length") == ["7.0"] * 5
    assert all(began <= record.ts <= time.time() for record in first.records)
    assert [skipped.reason for skipped in first.skipped] == ["a run that was archived"]
    [alone] = read_log(tmp_path / ".aim", run=second.name)
    assert repr(alone) == repr(second)
    with pytest.raises(ImportFormatError, match=r"has no run 's3'; it has: 's1', 's1-"):
        read_log(tmp_path, run="s3")


def test_a_trainer_that_tracks_is_followed_and_left_alone(tmp_path):
    """All polls together are what is read at the end, with a metric of an earlier step that came late."""
    aim.Repo(str(tmp_path), init=True)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path), "600"], stderr=subprocess.PIPE, text=True)
    chunks, tail, found, reads = tmp_path / ".aim" / "seqs" / "chunks", None, {}, 0
    while trainer.poll() is None:
        if tail is None and not any(chunks.glob("*/CURRENT")):
            time.sleep(0.05)
            continue
        tail = tail or LogTail(tmp_path)
        for record in tail.poll():
            assert record.attempt == 1
            found.setdefault(record.step, {}).update(record.metrics)
        reads += 1
    assert trainer.returncode == 0, trainer.communicate()[1]
    for record in [*tail.poll(), *tail.close()]:
        assert record.attempt == 1
        found.setdefault(record.step, {}).update(record.metrics)
    [run] = read_log(tmp_path)

    assert reads > 3
    assert (run.name, len(run.records), tail.problem) == ("live", 600, "")
    assert found == {record.step: dict(record.metrics) for record in run.records}
    assert found[9]["eval/reward"] == 0.5


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_broken_run_is_named_and_the_others_are_read(tmp_path, damage):
    """Where there is no other, that is the error."""
    whole, broken = (new_run(tmp_path, name) for name in ("whole", "broken"))
    chunks = tmp_path / ".aim" / "seqs" / "chunks"
    whole.close()
    broken.close()
    manifest = next((chunks / broken.hash).glob("MANIFEST-*"))
    manifest.unlink() if damage is None else manifest.write_bytes(damage)
    [run] = read_log(tmp_path)

    assert run.name == "whole"
    assert [skipped.reason.partition(" (")[0] for skipped in run.skipped] == ["run 'broken' cannot be read"]
    (chunks / whole.hash / "CURRENT").write_text("nonsense")
    with pytest.raises(ImportFormatError, match=r"no metrics of any step.*'whole' cannot be read"):
        read_log(tmp_path)
    (tmp_path / ".aim" / "run_metadata.sqlite").write_bytes(b"nonsense" * 200)
    with pytest.raises(ImportFormatError, match=r"no metrics of any step.*file is not a database"):
        read_log(tmp_path)


def test_a_repository_without_a_run_says_so(tmp_path):
    """As ``aim init`` leaves it."""
    aim.Repo(str(tmp_path), init=True)

    with pytest.raises(ImportFormatError, match="with 0 runs; has any run tracked anything yet"):
        read_log(tmp_path)


def said(code, *words):
    """Output of the command, which ends with ``code``."""
    command = [sys.executable, "-m", "rlwatch.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_command_scans_imports_and_watches(tmp_path):
    """A directory of a project with a repository and other logs; what cannot be read is one line."""
    for seed in (1, 2):
        run = aim.Run(repo=str(tmp_path), experiment="math-rl", **QUIET)
        run.name = f"s{seed}"
        for step in range(1, 150):
            run.track({"entropy": 1.0 if step < 100 else 0.01, "reward": 0.5, "grad_norm": 1.0}, step=step)
        run.close()
    (tmp_path / "train.log").write_text("step: 1, reward: 0.5\nstep: 2, reward: 0.6\n")
    repository, store = tmp_path / ".aim", tmp_path / "store"

    assert logs_in(tmp_path) == [tmp_path / "train.log", repository]
    text = said(1, "scan", tmp_path)
    assert all(name in text for name in ("s1", "s2", "train.log"))
    said(0, "import", tmp_path, "--store", store)
    assert said(0, "runs", "--store", store).count("math-rl") == 2
    assert "entropy" in said(1, "watch", repository, "--run", "s1", "--once", "--store", store)
    assert "holds several runs" in said(2, "watch", repository, "--once", "--store", store)
    for chunk in (repository / "seqs" / "chunks").iterdir():
        (chunk / "CURRENT").unlink()
    assert "cannot be read" in said(2, "scan", repository)
    assert len(said(2, "scan", repository).splitlines()) == 1
