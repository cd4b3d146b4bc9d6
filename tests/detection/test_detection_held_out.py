"""The limit of joint evidence that other projects set: a project's own runs have no say in it."""

from __future__ import annotations

from dataclasses import replace

from detection.methods import held_out
from detection.runs import Labelled
from detection.score import Run

from rlwatch.records import StepRecord
from rlwatch.testing.small_batches import SmallRun, small_run


def labelled(made: SmallRun, name: str, project: str, severity: str) -> Labelled:
    steps = tuple(row.step for row in made.rows)
    records = [StepRecord(row.step, dict(row.metrics)) for row in made.rows]
    return Labelled(Run(name, project, severity, made.onset, steps), records)


SOUND = [labelled(small_run(seed, every=4), f"sound {seed}", f"project {seed % 4}", "healthy") for seed in range(12)]
CRASH = labelled(small_run(5001, failure="noise", every=4), "crash", "project 1", "crash")


def test_a_crash_is_beyond_what_sound_runs_of_other_projects_show() -> None:
    *calm, told = held_out([*SOUND, CRASH])

    first, last = CRASH.run.window
    assert any(first <= alarm.step <= last for alarm in told.alarms)
    assert sum(bool(each.alarms) for each in calm) <= 1


def test_the_limit_is_that_of_other_projects() -> None:
    """A run called healthy that looks like the crash: it silences other projects, and not its own."""
    sound = [run for run in SOUND if run.run.project != "project 3"]
    odd = replace(CRASH, run=replace(CRASH.run, name="odd", severity="healthy"))

    among = held_out([*sound, odd, CRASH])[-1]
    odd_elsewhere = replace(odd, run=replace(odd.run, project="project 3"))
    beside = held_out([*sound, odd_elsewhere, CRASH])[-1]

    assert among.alarms
    assert not beside.alarms
