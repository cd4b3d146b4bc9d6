"""What was told is kept as it was, two states of the code are compared run by run, and figures have one source."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from detection import methods, page, record, runs, tables
from detection.record import Recorded
from detection.score import Alarm, Run, Told

ROOT = Path(__file__).parents[2]
STEPS = tuple(range(1, 201))


def recorded(*told: Told, method: str = tables.OURS) -> Recorded:
    severities = ("healthy", "crash", "transient")
    made = tuple(
        Run(f"run {i}", "p", severities[i % 3], 100.0 if i % 3 else None, STEPS, doubt=i == 2) for i in range(len(told))
    )
    return Recorded(made, {method: told})


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    told = Told((Alarm(95, True, "reward_drop", 90),), True, (Alarm(93, False, "reward_drop", 90),))
    kept = {
        "public": recorded(Told(), told, Told()),
        "public, every 5 (mean)": replace(recorded(told), every=5, how="mean"),
    }
    record.write(tmp_path / "told.json", kept)
    state, again = record.read(tmp_path / "told.json")
    assert again == kept
    assert state


def test_two_states_of_the_code_are_compared_run_by_run() -> None:
    before = recorded(Told(), Told((Alarm(110, False, "kl_drift"),)), Told((Alarm(50, True, "grad_spike"),), True))
    after = recorded(
        Told((Alarm(7, False, "no_signal"),)),
        Told((Alarm(104, False, "kl_drift"),)),
        Told((Alarm(50, True, "grad_spike"),)),
    )
    lines = list(record.changes(before, after, tables.OURS))
    assert lines == [
        "[healthy; 200 rows to 200] run 0: + no_signal warning 7",
        "[crash at 100; 200 rows to 200] run 1: kl_drift warning 110 -> 104",
        "[transient at 100, DOUBT; 200 rows to 200] run 2: no longer critical at its end",
    ]
    assert list(record.changes(before, before, tables.OURS)) == []


def test_runs_that_one_of_the_two_lacks_are_named() -> None:
    one, two = recorded(Told()), recorded(Told(), Told())
    assert list(record.changes(one, two, tables.OURS)) == ["only after: run 1: nothing"]
    assert list(record.changes(two, one, tables.OURS)) == ["only before: run 1"]


def test_labels_in_doubt_are_left_out_of_a_strict_score() -> None:
    whole = recorded(Told(), Told(), Told())
    assert len(whole.kept(strict=False)[0]) == 3
    kept, told = whole.kept(strict=True)
    assert [run.name for run in kept] == ["run 0", "run 1"]
    assert len(told[tables.OURS]) == 2


def test_every_method_judges_every_run_and_keeps_its_place() -> None:
    log = runs.sample_logs(ROOT / "sample_logs")[3:5]
    judges = {"clock": methods.by_row(methods.clock), "static": methods.by_row(methods.static)}
    found = record.record(log, judges, {}, jobs=2, title="samples")
    assert [run.name for run in found.runs] == [each.run.name for each in log]
    assert [told.alarms[0].step for told in found.told["clock"]] == [each.rows[39][0] for each in log]


def test_a_peer_judges_in_its_own_process_and_one_that_takes_too_long_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = runs.sample_logs(ROOT / "sample_logs")[3:4]
    (tmp_path / "first.py").write_text(
        "import json, sys\nfor line in sys.stdin: print(json.dumps([[json.loads(line)[0][0], True, 'x']]))\n"
    )
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    peers = {
        "first": methods.peer(Path(sys.executable), tmp_path / "first.py"),
        "slow": methods.peer(Path(sys.executable), tmp_path / "slow.py", longest=0.5),
    }
    found = record.record(log, {}, peers, jobs=2, title="samples")
    assert list(found.told) == ["first"]
    assert found.told["first"][0].alarms == (Alarm(log[0].rows[0][0], True, "x"),)
    assert "not judged by slow" in capsys.readouterr().out


def test_our_own_logs_are_labelled_from_what_is_expected_of_them() -> None:
    labels = {each.run.name: (each.run.severity, each.run.onset) for each in runs.sample_logs(ROOT / "sample_logs")}
    assert labels["healthy-verl-console.log"] == ("healthy", None)
    assert labels["no-signal-long.csv"][0] == "dead"
    assert labels["entropy-explosion-verl.jsonl"] == ("instability", 24.0)


def test_what_still_fires_at_the_end_is_told() -> None:
    logs = {each.run.name: each for each in runs.sample_logs(ROOT / "sample_logs")}
    assert methods.without_forecasts(logs["nonfinite-trl-console.log"]).critical_at_end
    assert not methods.without_forecasts(logs["healthy-trl-console.log"]).critical_at_end


# A folder of logs as their owners left them.


def put(folder: Path, path: str, rows: int) -> dict[str, str]:
    log = folder / path
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps({"step": s, "reward": 0.5, "entropy": 1.0}) + "\n" for s in range(1, rows + 1)))
    repo, _, inside = path.partition("/")
    return {"repo": repo.replace("+", "/"), "path": inside}


def test_wild_logs_are_healthy_and_what_holds_no_run_is_named(tmp_path: Path) -> None:
    listed = [
        put(tmp_path, "a+b/long.jsonl", 30),
        put(tmp_path, "a+b/short.jsonl", 5),
        put(tmp_path, "c+d/x.jsonl", 12),
    ]
    (tmp_path / "c+d" / "notes.txt").write_text("nothing of the kind\n")
    listed.append({"repo": "c/d", "path": "notes.txt"})
    (tmp_path / "provenance.json").write_text(json.dumps(listed))
    found, refused = runs.wild(tmp_path)
    assert [(each.run.name, each.run.project, each.run.severity) for each in found] == [
        ("a+b/long.jsonl", "a/b", "healthy"),
        ("c+d/x.jsonl", "c/d", "healthy"),
    ]
    assert set(refused) == {"a+b/short.jsonl", "c+d/notes.txt"}
    assert refused["a+b/short.jsonl"] == "5 rows"


# The rule of two witnesses.


def collapse(**also: float) -> methods.Rows:
    """Rewards fall from .8 to .2 at the 31st row; the other metrics go from 1 to what is given."""
    names = {"entropy": "policy/entropy", "clipped": "len/clipped", "length": "len/mean"}
    rows = []
    for step in range(1, 61):
        row = {"reward/mean": (0.8 if step <= 30 else 0.2) + 0.01 * (step % 2)}
        row |= {names[name]: (after if step > 30 else 1.0) for name, after in also.items()}
        rows.append((step, row))
    return rows


def test_a_fallen_reward_alone_is_one_witness() -> None:
    assert methods.two_witnesses(collapse()) == []
    assert methods.two_witnesses(collapse(entropy=1.9, clipped=1.2, length=0.5)) == []


@pytest.mark.parametrize("also", [{"entropy": 3.0}, {"clipped": 1.5}, {"length": 0.2}])
def test_a_second_witness_in_the_same_rows_is_an_alarm(also: dict[str, float]) -> None:
    assert methods.two_witnesses(collapse(**also))[0].step == 32


# One source of figures.


def test_the_pools_placebo_knows_the_projects_of_every_set() -> None:
    one = recorded(Told(), Told((Alarm(100),)))
    together = page.pooled(dict.fromkeys(page.POOLED, one))
    assert together is not None
    assert len(together.runs) == 6
    assert len({run.name for run in together.runs}) == 6
    assert page.pooled({"real_runs": one}) is None


def test_the_readme_gets_the_table_of_the_page(tmp_path: Path) -> None:
    sets = dict.fromkeys(page.POOLED, recorded(Told((Alarm(5),)), Told((Alarm(100),))))
    path = tmp_path / "README.md"
    path.write_text(f"before\n{page.BEGIN}\nstale figures\n{page.END}\nafter\n")
    page.into_readme(path, sets)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale figures" not in text
    assert page.readme(sets) in text
    written = page.page(sets, state="abc", command="make bench-detect")
    assert page.readme(sets) in written
    assert page.whole(sets) in written


def test_readmes_figures_are_those_of_the_page() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split(page.BEGIN)[1].split(page.END)[0].strip()
    assert table.count("\n") >= 3
    assert table in (ROOT / "docs" / "detection.md").read_text()
