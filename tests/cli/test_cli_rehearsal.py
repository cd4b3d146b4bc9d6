"""``rules test``: what a log would have sent, and what a configuration amounts to."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cli_helpers import Invoke, strict

from rlwatch.alerts.rules import AlertingConfig, QuietHours, Rule
from rlwatch.cli.rehearsal import rehearse
from rlwatch.importers.base import ImportedRun
from rlwatch.records import StepRecord
from rlwatch.scanner import scan

EVENING = datetime(2026, 3, 2, 21, 0, tzinfo=UTC).timestamp()
BROKEN = range(100, 110)
NAN = float("nan")


def rows(*, ts: float | None = EVENING, last: int = 160, gap_s: float = 60.0) -> list[StepRecord]:
    """A run whose gradient is NaN for ten steps, a minute a step."""
    return [
        StepRecord(
            s, {"grad_norm": NAN if s in BROKEN else 1.0 + s % 3}, ts=0.0 if ts is None else ts + gap_s * s, seq=s
        )
        for s in range(1, last)
    ]


def imported(records: list[StepRecord]) -> ImportedRun:
    return ImportedRun(name="seed1", source="", format="records", path="r", records=records)


def policy(*, quiet: tuple[QuietHours, ...] = (), **rule: object) -> AlertingConfig:
    values = {"channels": ("hook", "console"), "kinds": ("nonfinite",), "severity": "critical", "keep_firing_for": 5}
    values |= rule
    return AlertingConfig(rules=(Rule("r", **values),), quiet_hours=quiet)


def said(found) -> list[tuple[int, str, str, str]]:
    return [(line.step, line.event, ", ".join(line.channels), line.kept) for line in found.lines]


def test_a_rehearsal_tells_what_a_live_run_would_have_published():
    """Step, event and to whom; the same steps as a scan's alarms."""
    found = rehearse(imported(rows()), policy())
    alarms = scan(rows(), rules=policy().rules).alarms

    assert said(found) == [(100, "firing", "hook, console", ""), (116, "resolved", "hook, console", "")]
    assert [alarm.step for alarm in alarms] == [100]
    assert found.timed


def test_what_waits_for_the_morning_is_shown_with_the_reason_and_then_published():
    """By the times of the rows: 22:40 is night, 07:00 is not."""
    night = QuietHours(datetime(2026, 1, 1, 22).time(), datetime(2026, 1, 1, 7).time())
    quiet = policy(quiet=(night,), severity="warning", keep_firing_for=10_000)
    found = rehearse(imported(rows(last=700)), quiet)

    assert said(found) == [
        (100, "firing", "", "quiet hours until 07:00 UTC"),
        (600, "firing", "hook, console", ""),
    ]
    assert [datetime.fromtimestamp(line.at, UTC).hour for line in found.lines] == [22, 7]


def test_repeats_and_escalations_come_in_the_time_of_the_log():
    """What was told is taken to have arrived."""
    patient = policy(
        keep_firing_for=10_000,
        repeat_minutes=120,
        escalate_after_minutes=30,
        escalate_to=("pager",),
        channels=("hook",),
    )
    found = rehearse(imported(rows(last=360)), patient)

    assert said(found) == [
        (100, "firing", "hook", ""),
        (130, "unacknowledged", "pager", ""),
        (220, "repeated", "hook", ""),
        (250, "repeated", "pager", ""),
        (340, "repeated", "hook", ""),
    ]


def test_a_log_without_times_gets_them_from_its_steps():
    """From noon on, and it is said so."""
    found = rehearse(imported(rows(ts=None)), policy(keep_firing_for=10_000, repeat_minutes=10), step_s=30.0)

    assert not found.timed
    assert [line.step for line in found.lines] == [100, 120, 140]
    assert found.lines[0].at == 43_200.0 + 99 * 30.0


def test_an_empty_log_tells_nothing():
    """Not even an error."""
    assert rehearse(imported([]), policy()).lines == ()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The same run as a file of JSON lines."""
    path = tmp_path / "train.jsonl"
    lines = [json.dumps({"step": r.step, "data": dict(r.metrics)}) for r in rows()]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_command_shows_what_would_have_been_sent(log: Path, invoke: Invoke) -> None:
    """With a file of rules, on a log whose times are made up."""
    rules = log.with_name("mine.toml")
    rules.write_text(
        'default_rules = false\n[[rules]]\nname = "r"\nkinds = ["nonfinite"]\nseverity = "critical"\nchannels = ["webhook"]\n'
    )
    result = invoke("rules", "test", log, "--config", rules)

    assert result.exit_code == 0
    assert "times are derived from the steps, starting at 12:00 UTC" in result.stdout
    assert [line.split() for line in result.stdout.splitlines() if "nonfinite" in line] == [
        ["100", "01-01", "13:39", "firing", "critical", "nonfinite", "webhook"],
        ["111", "01-01", "13:50", "resolved", "critical", "nonfinite", "webhook"],
    ]
    assert "2 sent, 0 suppressed" in result.stdout


def test_the_command_gives_it_as_strict_json(log: Path, invoke: Invoke) -> None:
    """A list of runs."""
    [run] = strict(invoke("rules", "test", log, "--format", "json").stdout)

    assert run["lines"][0]["kinds"] == ["nonfinite"]
    assert run["lines"][0]["text"].startswith("[firing critical] default/")


def test_a_healthy_log_sends_nothing_and_a_bad_one_is_refused(tmp_path: Path, invoke: Invoke) -> None:
    """Each in one line."""
    fine = tmp_path / "fine.jsonl"
    fine.write_text("\n".join(json.dumps({"step": s, "data": {"grad_norm": 1.0 + s % 3}}) for s in range(60)))

    assert "no alerts would have been sent" in invoke("rules", "test", fine).stdout
    assert invoke("rules", "test", tmp_path / "none.jsonl").exit_code == 2


def test_a_configuration_is_shown_with_all_that_applies(tmp_path: Path, invoke: Invoke) -> None:
    """Rules, what happens if nobody acknowledges, groups, quiet hours, inhibition."""
    file = tmp_path / "mine.toml"
    file.write_text(
        """
inhibit = [{ when = ["nonfinite"], mutes = ["kl_drift"], up_to = "warning" }]
[grouping]
by = "project"
wait_s = 30
[[quiet_hours]]
from = "22:00"
to = "07:00"
time_zone = "Europe/Berlin"
days = ["sat", "sun"]
[notify.oncall]
kind = "webhook"
url = "https://pager.example.com/x"
[[rules]]
name = "mine"
kinds = ["kl_drift"]
repeat_minutes = 60
escalate_after_minutes = 30
escalate_after_steps = 100
escalate_to = ["oncall"]
escalate_severity = "critical"
"""
    )
    shown = invoke("rules", "test", file).stdout

    assert "repeats every 60 min; after 30 min or 100 steps critical, oncall" in shown
    assert "alerts grouped by project, waiting 30 s for each other" in shown
    assert "quiet from 22:00 to 07:00 Europe/Berlin on sat, sun for less than critical" in shown
    assert "while nonfinite is critical, kept back up to warning: kl_drift" in shown


ACTION = '[[actions]]\nname = "slow"\nkinds = ["reward_drop"]\ndo = "lower-lr"\nargs = { scale = 0.3 }\n'


def test_actions_are_checked_and_shown_and_a_log_says_what_it_cannot_judge(
    log: Path, tmp_path: Path, invoke: Invoke
) -> None:
    """A command that does not exist is refused as when a run begins; a kind nobody reports is warned of."""
    fine, odd, wrong = (tmp_path / f"{name}.toml" for name in ("fine", "odd", "wrong"))
    fine.write_text(ACTION)
    odd.write_text(ACTION.replace("reward_drop", "reward_crash"))
    wrong.write_text(ACTION.replace("lower-lr", "lower-rate"))

    shown, tried = invoke("rules", "test", fine), invoke("rules", "test", log, "--config", fine)
    told = " ".join(shown.stdout.split())
    assert "action 'slow': tries out lower-lr scale=0.3 upon reward_drop (warning or worse), at most 1 in a run" in told
    assert "not tested on a log: run_silent, run_crashed, action 'slow'" in " ".join(tried.stdout.split())
    assert invoke("rules", "test", odd).exit_code == 1
    assert [invoke("rules", "test", *args).exit_code for args in ((wrong,), (log, "--config", wrong))] == [2, 2]
