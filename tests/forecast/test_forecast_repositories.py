"""Runs of others are counted by repository: those of one fail alike, and are alarmed alike."""

import numpy as np
import pytest
from forecast.scoring.pages import pages
from forecast.scoring.scorer import ONCE, evaluate
from forecast.scoring.skill import ToolScores
from forecast_runs import steady

from rlwatch.forecast.labels import Label, Labels, RunOutcome
from rlwatch.forecast.tables import table_of_rows


def judged(alarms, labels, *, every=1):
    """One tool without a dial; ``alarms``: run -> steps."""
    table = table_of_rows({label.run: steady(300, every=every) for label in labels})
    score = np.full(len(table), np.nan)
    for run, steps in alarms.items():
        mine = table.run_of == table.place[run]
        score[mine & np.isin(table.step, steps)] = 1.0
    tool = ToolScores("one", score, alarms_only=True)
    return evaluate(table, Labels("index", tuple(labels)), [tool], split="none", draws=10).to_dict()


def failed(run, repository, onset=150):
    """A run of that repository that failed."""
    return Label(run, RunOutcome.EARLY if onset < 55 else RunOutcome.EVENT, onset, "instability", repository=repository)


def sound(run, repository):
    """One that did not."""
    return Label(run, RunOutcome.CLEAN, repository=repository)


def found(evaluation, name):
    """What is told of a repository."""
    return evaluation["tools"][0]["repositories"][name]


def test_an_alarm_by_the_onset_and_one_that_comes_late_are_told_apart():
    """Ten steps after it is late, eleven is not found at all; what came 101 steps before is another matter."""
    runs = [failed(name, "a/b") for name in ("at", "after", "too-late", "too-early")]
    at = judged({"at": [150], "after": [160], "too-late": [161], "too-early": [49]}, [*runs, sound("c", "a/b")])

    told = found(at, "a/b")
    assert (told["failures"], told["by_onset"]["found"], told["late"]["found"]) == (4, 1, 2)
    assert (told["clean"], told["clean_alarmed"]) == (1, 0)


def test_ten_rows_of_a_coarse_log_are_as_good_as_ten_steps():
    """A row every 10 steps: 100 steps after the onset are late, 110 are nothing."""
    runs = [failed("tenth-row", "a/b"), failed("eleventh-row", "a/b")]
    at = judged({"tenth-row": [250], "eleventh-row": [260]}, runs, every=10)
    assert found(at, "a/b")["late"]["found"] == 1


def test_an_early_failure_counts_from_the_start_of_monitoring():
    """Nothing before step 40 counts for or against a tool."""
    runs = [failed("at-start", "a/b", onset=3), failed("late", "a/b", onset=3), failed("later", "a/b", onset=3)]
    told = found(judged({"at-start": [40], "late": [50], "later": [51]}, runs), "a/b")
    assert (told["by_onset"]["found"], told["late"]["found"]) == (1, 2)


def test_the_placebo_gives_each_repository_the_same_weight():
    """Ten quiet runs of one repository and one noisy run of another: a half, not an eleventh."""
    quiet = [sound(f"quiet-{i}", "quiet/one") for i in range(10)]
    at = judged({"noisy": [100], "bad": [100]}, [failed("bad", "a/b"), *quiet, sound("noisy", "noisy/one")])

    assert found(at, "a/b")["by_onset"] == {"found": 1, "placebo": pytest.approx(0.5), "p": pytest.approx(0.5)}


def test_many_failures_of_one_repository_count_once():
    """Found in half of them is found; a repository with a third of its clean runs alarmed is not an alarmed one."""
    runs = [failed("a1", "a/b"), failed("a2", "a/b"), failed("c1", "c/d"), failed("c2", "c/d"), failed("c3", "c/d")]
    clean = [sound(f"clean-{i}", "e/f") for i in range(3)]
    at = judged({"a1": [100], "c1": [100], "clean-0": [100]}, [*runs, *clean])

    once = found(at, ONCE)
    assert (once["failures"], once["by_onset"]["found"], once["clean"], once["clean_alarmed"]) == (2, 1, 1, 0)
    assert once["by_onset"]["placebo"] == pytest.approx(2 / 3)
    assert once["by_onset"]["p"] == pytest.approx(1 - (2 / 3) ** 2)


def test_the_page_has_a_row_for_each_repository_and_one_for_all():
    """A dash where a repository has nothing to be counted; no page where no label names a repository."""
    nearly = Label("nearly", RunOutcome.AMBIGUOUS, repository="g/h")
    at = judged({"bad": [100]}, [failed("bad", "a/b"), sound("good", "c/d"), nearly])
    (page,) = (page for page in pages(at) if page.title == "By repository")
    assert list(page.rows) == [
        ("a/b", "1/1 by 0.0, p 0; late 1/1 by 0.0, p 0"),
        ("c/d", "(0/1)"),
        ("g/h", "-"),
        (ONCE, "1/1 by 0.0, p 0; late 1/1 by 0.0, p 0 (0/1)"),
    ]
    nameless = judged({}, [failed("bad", ""), sound("good", "")])
    assert [page.title for page in pages(nameless)].count("By repository") == 0
