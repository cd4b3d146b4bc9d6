"""Every kind of finding, whatever registers, comes where it came when rows are further apart, and sound runs stay so.

Within ten steps or two rows of where it is in the log as it is, with a row every 2, 5, 10 and 20 steps, means and last
values; of our recorded logs here, of the corpus and of every public run there is in the long tests. What is not kept is
written down, set by set and kind by kind, in ``benchmarks/detection/cadence.toml``: it may become less, not more.
"""

from pathlib import Path

import pytest
from detection import cadence, methods, record, runs
from detection.cadence import Kept
from detection.score import Alarm, Run, Told

OWED = cadence.read_owed(Path(cadence.__file__).with_name("cadence.toml").read_text())


def broken(name: str) -> list[str]:
    labelled, judges = runs.named(name), {"ours": methods.ours}
    told = {name: record.record(labelled, judges, {}, jobs=1, title=name)}
    told |= cadence.judged_every_way(name, labelled, judges, [2, 5, 10, 20], jobs=1)
    return cadence.broken(cadence.ledger(told, "ours"), OWED)


def test_our_recorded_logs_are_told_of_in_time_at_every_cadence() -> None:
    assert broken("samples") == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", [runs.CORPUS, "real_runs", "real_runs_2", "wild"])
def test_so_are_the_corpus_and_all_public_runs(name: str) -> None:
    try:
        found = broken(name)
    except FileNotFoundError as error:
        pytest.skip(f"not judged: {error}")
    assert found == []


def recorded(every: int, *steps: int | None, severity: str = "crash") -> record.Recorded:
    """A run for each step at which a fall is told of; None: it is not."""
    labelled = tuple(Run(str(i), "p", severity, None, tuple(range(1, 201))) for i in range(len(steps)))
    told = (Told(findings=() if step is None else (Alarm(step, True, "fall"),)) for step in steps)
    return record.Recorded(labelled, {"ours": tuple(told)}, every)


def test_what_is_kept_is_counted_by_kind_and_cadence() -> None:
    told = {"set": recorded(0, 50, 60, None), "set, every 5 (last)": recorded(5, 60, 71, 40)}
    told["set, every 5 (mean)"] = recorded(5, 55, 60, None)

    assert cadence.ledger(told, "ours")["set"] == {
        level: {5: Kept(told=4, same=3, quiet=0, newly=0)} for level in ("fall.critical", "fall.any")
    }


def test_sound_runs_that_are_told_of_newly_are_counted() -> None:
    told = {
        "set": recorded(0, None, None, severity="healthy"),
        "set, every 2 (mean)": recorded(2, None, 8, severity="healthy"),
    }

    assert cadence.ledger(told, "ours")["set"]["fall.critical"] == {2: Kept(told=0, same=0, quiet=2, newly=1)}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Kept(4, 3, 9, 1), 0),
        (Kept(4, 4, 9, 0), 0),
        (Kept(5, 4, 9, 1), 0),
        (Kept(4, 2, 9, 0), 1),
        (Kept(4, 3, 9, 2), 1),
    ],
)
def test_more_may_be_kept_than_is_written_down_and_not_less(now: Kept, said: int) -> None:
    debts = cadence.read_owed(cadence.owed({"set": {"fall.any": {5: Kept(4, 3, 9, 1), 10: Kept(2, 2, 9, 0)}}}))

    assert debts == {"set": {"fall.any": {5: Kept(4, 3, 9, 1)}}}
    assert len(cadence.broken({"set": {"fall.any": {5: now}}}, debts)) == said


def test_a_kind_that_nothing_is_written_down_of_has_to_keep_all() -> None:
    assert cadence.broken({"set": {"new.any": {2: Kept(3, 3, 9, 0)}}}, OWED) == []
    (line,) = cadence.broken({"set": {"new.any": {2: Kept(3, 2, 9, 0)}}}, OWED)
    assert line == "set, new.any, every 2 steps: 2 of 3 in time, 0 of 9 sound newly"
