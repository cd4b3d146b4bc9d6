"""Whether a run is paused: what it was told last, and whether it lives and has not gone on since."""

from dataclasses import replace

import pytest
from rlwatch_app import commands
from rlwatch_app.health import Word, judge, pause_of, pause_words

from rlwatch.control.commands import COMMAND_KINDS
from rlwatch.control.liveness import Pace
from rlwatch.records import Command, CommandStatus, RunInfo, RunState
from rlwatch.state import End, Ending, verdict_of

NOW = 1_000_000.0
WELL = verdict_of((), {}, ending=Ending(End.GOES_ON))
LIVE = RunInfo("r", last_step=480, last_ts=NOW - 900, heartbeat_at=NOW - 4, created_at=NOW - 9000)


def done(kind, ago, step=480, **more):
    fields = {"requested_by": "ann@lab", "why": "look at the samples", "finished_at": NOW - ago, **more}
    return Command(f"{kind}-{ago}", "r", kind, {"minutes": 60.0} if kind == "pause" else {}, finished_step=step,
                   **{"status": CommandStatus.DONE, **fields})  # fmt: skip


def test_a_paused_run_says_where_who_why_and_until_when():
    """Not that it is silent."""
    pause = pause_of(LIVE, [done("pause", 360)], NOW)
    assert pause_words(pause, NOW) == (
        "paused at step 480 by ann@lab: look at the samples; resumes by itself in 54\u202fmin"
    )
    health = judge(LIVE, WELL, NOW, Pace(5.0), pause)
    assert (health.word, health.needs_you) == (Word.PAUSED, False)
    assert judge(LIVE, WELL, NOW, Pace(5.0)).word is Word.STALE


@pytest.mark.parametrize(
    ("run", "commands"),
    [
        (LIVE, []),
        (LIVE, [done("pause", 360), done("resume", 60)]),
        (LIVE, [done("pause", 360), done("stop", 60)]),
        (LIVE, [done("pause", 360, status=CommandStatus.REJECTED)]),
        (LIVE, [done("pause", 360, status=CommandStatus.CLAIMED, finished_at=None)]),
        (LIVE, [done("pause", 3700)]),
        (replace(LIVE, last_step=481), [done("pause", 360)]),
        (replace(LIVE, heartbeat_at=NOW - 100), [done("pause", 360)]),
        (replace(LIVE, state=RunState.FINISHED), [done("pause", 360)]),
    ],
    ids=["never", "resumed", "stopped", "refused", "on its way", "over", "went on", "dead", "finished"],
)
def test_it_is_not_paused(run, commands):
    """Each for its own reason."""
    assert pause_of(run, commands, NOW) is None


def test_a_second_pause_counts_after_a_resume():
    """The last word counts, whatever the order of the rows."""
    commands = [done("resume", 200), done("pause", 100, step=480), done("pause", 300, step=470)]
    assert pause_of(LIVE, commands, NOW).step == 480


def test_every_kind_has_its_words():
    """The page offers what the house knows, no more and no less."""
    assert list(commands.FORMS) == list(COMMAND_KINDS)
    for kind, form in commands.FORMS.items():
        assert form.kind == kind
        assert form.labels.keys() == COMMAND_KINDS[kind].args.keys()


@pytest.mark.parametrize("paused", [True, False])
def test_every_kind_that_makes_sense_now_can_be_reached(paused):
    """By the first button or the menu."""
    first = "resume" if paused else commands.RESET
    nonsense = "pause" if paused else "resume"
    assert {first, nonsense, *commands.menu_kinds(paused=paused)} == set(COMMAND_KINDS)
    assert first not in commands.menu_kinds(paused=paused)
