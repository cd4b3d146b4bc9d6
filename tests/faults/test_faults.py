"""What a run survives: one real trial of each kind of fault; ``make thorough`` has more kinds, ``make faults`` hundreds
of trials, and every fault.

The trials run side by side before the first of these tests: most of their time is waiting for processes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import faults
import pytest
from faultchild import Acks, kept_row, row
from faultlab import Judged, Lab, Life, Receiver, Tally, account, compare
from faults import BAD, FAULTS, GROUPS, PAGE, Fault, Outcome, Trial, disturbed, page, run

from rlwatch.records import StepRecord

QUICK = [fault for fault in FAULTS if fault.quick]
ONE_OF_A_KIND = ("kill-100", "nan-watch", "full-freed", "removed-run", "held-3s", "term", "fork", "receiver-hang")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With patience: nothing here is about seconds."""
    scratch = tmp_path_factory.mktemp("faults")
    for path in (scratch, *scratch.parents[:3]):  # one child is the user nobody
        if path.stat().st_uid and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o011)
    return Lab(scratch, slack=3.0)


@pytest.fixture(scope="module")
def outcomes(lab: Lab, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Each fault's that is to be tested."""
    chosen = [
        item.callspec.id for item in request.session.items if item.path == request.path and "fault" in item.fixturenames
    ]
    wanted = [fault for fault in QUICK if fault.name in chosen]
    return {fault.name: outcome for fault, outcome in run(wanted, lab, quick=True, jobs=6)}


def case(fault: Fault) -> object:
    """A fault as a parameter; one of each kind is tried at every change, the others are thorough."""
    marks = [] if fault.name in ONE_OF_A_KIND else [pytest.mark.thorough]
    return pytest.param(fault, id=fault.name, marks=marks)


@pytest.mark.parametrize("fault", [case(fault) for fault in QUICK])
def test_a_run_survives(fault: Fault, outcomes: dict[str, Outcome]):
    """Nothing lost that was promised, told twice or late, nothing raised into training."""
    outcome = outcomes[fault.name]
    if outcome.unmeasured:
        pytest.skip(f"THIS FAULT WAS NOT TRIED: {outcome.unmeasured}")

    assert not fault.broken(outcome.tally), f"{fault.title}: {outcome.tally}"


def test_a_run_that_nothing_befalls_loses_nothing(lab: Lab):
    """The account can be even: what is found missing is missing."""
    tally = Tally(slack=lab.slack)
    with lab.place() as place:
        disturbed(lab, tally, place, place / "store", heard=False)

    assert not tally.failed
    assert (tally.rows, tally.lost, tally.unjudged) == (240, 0, 0)
    assert tally.judgements > 100
    assert tally.due == 1


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """Of a process that logged five steps."""
    with Acks(tmp_path / "acks", room=10) as acks:
        for _ in range(5):
            acks.returned(0.001)
        yield Life(1, 0, acks, died=acks.when(4) + 1.0)


ROWS = [StepRecord(step, kept_row(step), 0.0, 1, seq=step + 1) for step in range(5)]


@pytest.mark.parametrize(
    ("records", "lost", "wrong"),
    [
        (ROWS, 0, 0),
        ([*ROWS, replace(ROWS[0], step=5, metrics=kept_row(5), seq=6)], 0, 0),  # it was on its way
        (ROWS[:3], 2, 0),
        ([*ROWS, replace(ROWS[4], seq=6)], 0, 1),
        ([ROWS[1], ROWS[0], *ROWS[2:]], 0, 1),
        ([*ROWS[:4], replace(ROWS[4], metrics={**ROWS[4].metrics, "mine/exact": 4.3})], 0, 1),
        ([replace(ROWS[0], metrics=row(0)), *ROWS[1:]], 0, 1),  # NaN is missing
        ([*ROWS, replace(ROWS[0], step=10_000_000, metrics=kept_row(10_000_000), seq=6)], 0, 1),
    ],
)
def test_what_is_lost_twice_foreign_or_changed_is_counted(life: Life, records: list[StepRecord], lost: int, wrong: int):
    """The account is not even when it should not be."""
    tally = Tally()
    account(tally, records, [life])

    assert (tally.rows, tally.lost, tally.wrong) == (5, lost, wrong)
    assert (tally.oldest_s > 1.0) == bool(lost)


def test_a_missing_judgement_is_counted():
    """Findings, forecasts and alerts alike."""
    whole = Judged(
        frozenset({("f", 1)}), frozenset({("forecast", 1), ("forecast", 2)}), frozenset({("a",)}), ordered=True
    )
    tally = Tally()
    compare(tally, replace(whole, findings=frozenset(), forecasts=frozenset({("forecast", 1)})), whole)

    assert (tally.judgements, tally.unjudged) == (4, 2)
    assert FAULTS[0].broken(tally)


def test_a_receiver_counts_a_message_only_when_it_took_it():
    """A hanging one has seen it, and was not told."""
    import httpx

    send = partial(
        httpx.post,
        json={"alert": {"kind": "nonfinite"}},
        headers={"X-RLWatch-Event": "firing", "X-RLWatch-Delivery": "m1"},
    )
    with Receiver("500") as receiver:
        assert send(receiver.url).status_code == 500
        assert receiver.told() == []
        receiver.behaviour = "ok"
        assert send(receiver.url).status_code == 204
        assert receiver.told() == ["m1"]


def test_the_page_has_a_line_for_every_fault():
    """In the order of the list; what was not measured says so."""
    text = PAGE.read_text(encoding="utf-8")
    found: dict[str, list[tuple[str, str]]] = {}
    silent = []
    for line in text.splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif cells := re.fullmatch(r"\| (.*?) \| (\d+) \|.*\|", line):
            found[list(found)[-1]].append((cells[1], line))
            silent += [line] if cells[2] == "0" and "not measured:" not in line else []

    assert {group: [title for title, _ in found.get(group, [])] for group in GROUPS} == {
        group: [fault.title for fault in faults] for group, faults in GROUPS.items()
    }
    assert silent == []


def test_a_fault_that_was_not_run_is_not_passed_over():
    """Nor one that broke its promise."""
    lost = Outcome(Tally(trials=1, rows=10, lost=3, losing=1, oldest_s=0.5))
    text = page({"kill-10": lost}, "make faults", "a machine")

    assert text.count("not measured: not run") == len(FAULTS) - 1
    assert "| at 10 rows/s | 1 | 3 of 10 rows | 0 | in 1 trials, the oldest row lost 0.50 s old **broken** |" in text
    assert BAD[0] < BAD[1]


def test_an_interrupted_run_of_all_faults_goes_on_with_what_it_has_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each fault's figures are kept as soon as they are there, and trials that were left out are tried again."""
    tried: list[str] = []
    ends = {"two": KeyboardInterrupt}

    def trial(name: str) -> Trial:
        def of(lab: Lab, rng: random.Random, tally: Tally) -> None:
            tried.append(name)
            tally.rows += 5
            if name in ends:
                raise ends.pop(name)

        return of

    monkeypatch.setattr(faults, "RESULTS", tmp_path / "build" / "results.json")
    monkeypatch.setattr(faults, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(faults, "FAULTS", [Fault(n, n, trial(n), 1, 2) for n in ("one", "two", "three")])
    monkeypatch.setattr(faults, "GROUPS", {"all": faults.FAULTS})

    with pytest.raises(KeyboardInterrupt):
        faults.main(["--jobs", "1"])
    assert not faults.PAGE.exists()
    tried.clear()

    assert faults.main(["--jobs", "1", "--resume"]) == 0
    assert tried == ["two", "two", "three", "three"]
    assert "| one | 2 | 0 of 10 rows |" in faults.PAGE.read_text()

    tried.clear()
    assert faults.main(["--jobs", "1"]) == 0
    assert len(tried) == 6
