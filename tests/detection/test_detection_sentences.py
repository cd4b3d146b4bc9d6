"""What is said of a run never contradicts itself, at any row of any log."""

import math

import pytest
from detection import runs, sentences

from rlwatch.records import StepRecord
from rlwatch.state import State

SAMPLES = runs.named("samples")


@pytest.mark.parametrize("log", SAMPLES, ids=lambda log: log.run.name)
def test_no_sentence_of_our_recorded_logs_contradicts_itself(log):
    """State, cause, forecast and headline at every row, and the state that the label asks for at the end."""
    wrong, last = [], None
    for last in sentences.told_of(log.records, log.source, forecasts=True):
        wrong += [(last.step, each) for each in sentences.broken(last)]

    assert wrong == []
    assert last.verdict.state in sentences.STATES[log.run.severity]
    if log.run.severity == "healthy":
        assert last.headline == "Healthy: no failure was found."


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ([], None),
        ([{"reward": 0.5, "entropy": 1.0}], State.NOT_JUDGED),
        ([{"reward": 0.5 + 0.01 * (i % 5), "entropy": 1.0} for i in range(60)], State.HEALTHY),
        ([{"entropy": 1.0, "loss": 0.1} for _ in range(60)], State.NOT_JUDGED),
        ([{"reward": 0.5 + 0.01 * (i % 5), "kl": float("nan") if i > 40 else 0.1} for i in range(60)], State.COLLAPSED),
    ],
)
def test_short_blind_and_broken_logs(rows, state):
    """One row, no reward, and values that became NaN."""
    said = list(sentences.told_of([StepRecord(i, row, seq=i + 1) for i, row in enumerate(rows)]))
    assert [wrong for each in said for wrong in sentences.broken(each)] == []
    assert said[-1].verdict.state is (state or State.NOT_JUDGED)


def without_a_fault(name):
    """Whether the corpus has no fault in a run of this name: recipes that have none, and the twins of TRL's."""
    plain = ("plain", "cosine", "epochs", "minibatches", "small_lr", "engine_int8", "trl_plain", "trl_rloo")
    return name.startswith(plain) or (name.startswith("trl_") and name.endswith("-twin"))


def test_sound_trainings_are_said_to_be_healthy_and_nothing_more():
    """At every row, and at the end: no alarm, no cause."""
    told = {
        log.run.name: list(sentences.told_of(log.records, log.source))
        for log in runs.named(runs.CORPUS)
        if without_a_fault(log.run.name)
    }

    assert len(told) >= 20
    assert {name: said[-1].headline for name, said in told.items()} == dict.fromkeys(
        told, "Healthy: no failure was found."
    )
    assert [name for name, said in told.items() if any(each.alarmed or each.cause for each in said)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", [runs.CORPUS, "real_runs", "real_runs_2", "wild"])
def test_nor_does_any_of_the_corpus_and_of_all_public_runs(name):
    """The same at every row of every run there is."""
    try:
        labelled = runs.named(name)
    except FileNotFoundError as error:
        pytest.skip(f"not judged: {error}")
    assert sentences.scored(labelled).contradicted == ()


def test_last_rows_that_earn_nothing_are_in_the_headline_until_the_reward_is_back():
    """Two rows at a fifth of the level are too few for a warning, and no run in which they come last is just healthy."""
    level = [0.70 + 0.05 * math.sin(2.4 * i) for i in range(70)]
    rows = [*level, 0.3, 0.1, *level[:12]]
    records = [StepRecord(i, {"reward": row, "entropy": 0.5}, seq=i + 1) for i, row in enumerate(rows)]

    (*_, ended), (*live, _) = sentences.told_of(records[:72]), sentences.told_of(records)

    assert ended.headline == "Healthy, but reward fell from step 70: too few rows to judge."
    assert ended.verdict.exit_code == 0
    assert live[72].headline == "Healthy at step 72, but reward fell from step 70: too few rows to judge."
    assert live[-1].headline == "Healthy at step 83: no failure was found."
    assert all(sentence.verdict.state is State.HEALTHY for sentence in live[9:])
