"""What applies to all rules: groups, quiet hours, inhibition; as it is configured and as it works."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, time, timedelta
from itertools import permutations
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from dispatch_examples import CRITICAL, WARNING, alert
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.alerts import schema
from rlwatch.alerts.config import load_config
from rlwatch.alerts.rules import (
    DAYS,
    HEARTBEAT_KINDS,
    AlertGrouping,
    AlertingConfig,
    GroupBy,
    Inhibition,
    QuietHours,
    builtin_kinds,
    default_inhibitions,
    inhibitors,
    unknown_kinds,
)
from rlwatch.errors import ConfigError
from rlwatch.records import Severity

FULL = """
[grouping]
by = "project"
wait_s = 30

[[quiet_hours]]
from = "22:00"
to = "07:30"
time_zone = "Europe/Berlin"
let_through = "warning"
days = ["mon", "sun"]

[[quiet_hours]]
from = 12:00:00
to = 13:00:00

[[inhibit]]
when = ["nonfinite"]
mutes = ["grad_spike"]
min_severity = "warning"
up_to = "info"
"""


def read(tmp_path: Path, text: str) -> AlertingConfig:
    (tmp_path / "rlwatch.toml").write_text(text, encoding="utf-8")
    return load_config(tmp_path / "rlwatch.toml", env={}).policy


def test_a_file_says_all_there_is_to_say(tmp_path: Path):
    """Times as text or as TOML's own."""
    assert read(tmp_path, FULL) == AlertingConfig(
        grouping=AlertGrouping(GroupBy.PROJECT, 30.0),
        quiet_hours=(
            QuietHours(time(22), time(7, 30), "Europe/Berlin", Severity.WARNING, ("mon", "sun")),
            QuietHours(time(12), time(13)),
        ),
        inhibitions=(Inhibition(("nonfinite",), ("grad_spike",), Severity.WARNING, Severity.INFO),),
    )


def test_a_file_that_names_no_inhibition_keeps_the_usual_and_an_empty_list_none(tmp_path: Path):
    """Leaving out is not turning off."""
    assert read(tmp_path, "").inhibitions == default_inhibitions()
    assert read(tmp_path, "inhibit = []").inhibitions == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[grouping]\nby = "rack"', "grouping.by: Input should be 'none', 'run' or 'project', got 'rack'"),
        ("[grouping]\nwait_s = 4000", "grouping.wait_s: Input should be less than or equal to 3600, got 4000"),
        ("[grouping]\nwait = 1", "grouping.wait: unknown key; did you mean 'wait_s'?"),
        ('[[quiet_hours]]\nfrom = "22:00"', "quiet_hours[0].to: missing"),
        (
            '[[quiet_hours]]\nfrom = "22h"\nto = "07:00"',
            "quiet_hours[0].from: must be a time of day, as in '22:00', got '22h'",
        ),
        ('[[quiet_hours]]\nfrom = "22:00"\nto = "22:00"', "from and to are both 22:00; leave the table out for none"),
        (
            '[[quiet_hours]]\nfrom = "22:00"\nto = "07:00"\ntime_zone = "Mars/Base"',
            "no time zone 'Mars/Base' on this machine; give a name as in 'Europe/Berlin'",
        ),
        (
            '[[quiet_hours]]\nfrom = "22:00"\nto = "07:00"\ndays = ["monday"]',
            "quiet_hours.days must be of mon, tue, wed, thu, fri, sat, sun, got monday",
        ),
        (
            '[[quiet_hours]]\nfrom = "22:00"\nto = "07:00"\nlet_through = "loud"',
            "quiet_hours[0].let_through: Input should be 'info', 'warning' or 'critical', got 'loud'",
        ),
        ("[[inhibit]]", "inhibit[0].when: missing"),
        ("[[inhibit]]\nwhen = []", "inhibit: when must name the kinds that keep others back, got none"),
        (
            '[[inhibit]]\nwhen = ["kl_drift"]\nmutes = ["kl_drift"]',
            "inhibit: 'kl_drift' cannot keep itself back; name it in when or in mutes",
        ),
        (
            '[[rules]]\nname = "a"\nescalate_to = ["pager"]\nescalate_after_steps = 5',
            "rules[0].escalate_to: there is no channel 'pager'; add [notify.pager]",
        ),
        ('[[rules]]\nname = "a"\nrepeat_minutes = "x"', "rules[0].repeat_minutes: Input should be a valid number"),
    ],
)
def test_what_is_wrong_is_said_with_its_key_and_the_value_got(tmp_path: Path, text: str, said: str):
    """One clear error, so that the next try is right."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)

    assert said in str(error.value)
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AlertGrouping(by="rack"), "grouping.by must be one of none, run, project, got 'rack'"),
        (lambda: AlertGrouping(wait_s=-1), "grouping.wait_s must be 0 to 3600 seconds, got -1"),
        (lambda: QuietHours(time(1), time(2), let_through="x"), "quiet_hours.let_through must be info, warning or"),
        (lambda: QuietHours(time(1), time(2), days=()), "quiet_hours.days must be of mon, .* got none"),
        (lambda: Inhibition(("a",), up_to="x"), "inhibit.up_to must be info, warning or critical, got 'x'"),
    ],
)
def test_what_is_wrong_in_code_is_refused_too(make, said: str):
    """At construction."""
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_kind_nothing_reports_is_a_warning(tmp_path: Path):
    """It may be a detector of one's own."""
    (tmp_path / "r.toml").write_text('[[inhibit]]\nwhen = ["nonfinit"]\n')
    [warning] = load_config(tmp_path / "r.toml", env={}).warnings

    assert "inhibit names the kind 'nonfinit', which no detector reports; did you mean 'nonfinite'?" in warning


def test_the_file_knows_every_field():
    """A new one must not be forgotten."""
    renamed = {"start": "from", "end": "to"}
    for table, kind in (
        (schema.GroupingTable, AlertGrouping),
        (schema.QuietHoursTable, QuietHours),
        (schema.InhibitTable, Inhibition),
    ):
        in_file = {field.alias or name for name, field in table.model_fields.items()}
        assert in_file == {renamed.get(field.name, field.name) for field in fields(kind)}


hours = st.builds(
    lambda start, length, zone, days: QuietHours(
        start, (datetime(2026, 1, 1, start.hour, start.minute) + timedelta(minutes=length)).time(), zone, days=days
    ),
    st.times().map(lambda at: at.replace(second=0, microsecond=0)),
    st.integers(1, 1439),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]),
    st.lists(st.sampled_from(DAYS), min_size=1, unique=True).map(tuple),
)


@given(hours, st.integers(1_760_000_000 // 60, 1_800_000_000 // 60))
def test_quiet_hours_are_what_a_clock_on_the_wall_says(quiet: QuietHours, minute: int):
    """Against a slow reading: begun on a day that counts, not ended; over midnight and over changes of the clocks."""
    now = 60.0 * minute
    local = datetime.fromtimestamp(now, ZoneInfo(quiet.time_zone))
    clock = local.time().replace(tzinfo=None)
    today, yesterday = DAYS[local.weekday()], DAYS[(local.weekday() - 1) % 7]
    if quiet.start < quiet.end:
        expected = quiet.start <= clock < quiet.end and today in quiet.days
    else:
        expected = (clock >= quiet.start and today in quiet.days) or (clock < quiet.end and yesterday in quiet.days)
    until = quiet.until(now)

    changes = (
        local.utcoffset() != (local + timedelta(days=1)).utcoffset()
        or local.utcoffset() != (local - timedelta(days=1)).utcoffset()
    )
    assert changes or (until is not None) == expected
    if until is not None:
        end = datetime.fromtimestamp(until, UTC).astimezone(ZoneInfo(quiet.time_zone)).time()
        assert until > now
        assert changes or end == quiet.end


def test_the_end_of_the_night_follows_the_change_of_the_clocks():
    """29 March 2026: in Berlin two o'clock is three o'clock."""
    night = QuietHours(time(22), time(7), "Europe/Berlin")
    eleven = datetime(2026, 3, 28, 23, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()

    assert (night.until(eleven) - eleven) / 3600 == 7.0


def ids(*alerts):
    return [each.alert_id for each in alerts]


def test_a_cause_keeps_its_symptoms_back_and_nothing_else():
    """On its run, of the kinds named, up to the severity named."""
    cause = alert("mismatch_growth", severity=CRITICAL)
    symptom, worse = alert("grad_spike"), alert("reward_drop", severity=CRITICAL)
    elsewhere, unrelated = alert("grad_spike", run="other"), alert("nonfinite")

    kept = inhibitors([cause, symptom, worse, elsewhere, unrelated], [cause], default_inhibitions())

    assert kept == {symptom.alert_id: cause}
    assert inhibitors([symptom], [alert("mismatch_growth", severity=WARNING)], default_inhibitions()) == {}


def test_by_default_a_critical_collapse_keeps_back_what_follows_from_it_and_no_other_collapse():
    """Critical or not; a critical mismatch only what is a warning."""
    collapse, mismatch = alert("entropy_collapse", severity=CRITICAL), alert("mismatch_growth", severity=CRITICAL)
    after = [alert(kind, severity=CRITICAL) for kind in ("no_signal", "reward_drop", "kl_drift")]
    others = [alert(kind, severity=CRITICAL) for kind in ("nonfinite", "length_collapse", "mismatch_growth")]

    assert sorted(inhibitors([*after, *others], [collapse], default_inhibitions())) == sorted(ids(*after))
    assert inhibitors([*after, collapse], [mismatch], default_inhibitions()) == {}
    assert len(inhibitors([alert("reward_drop"), alert("weight_tail")], [mismatch], default_inhibitions())) == 2


def test_the_usual_inhibitions_name_kinds_that_are_reported():
    """Or they would never hold."""
    assert unknown_kinds((), default_inhibitions()) == []


@pytest.mark.parametrize("crash", ["nonfinite", "run_crashed"])
def test_by_default_a_crash_keeps_everything_else_back_but_that_the_run_is_gone(crash: str):
    """Critical alerts, too: they follow from it."""
    others = [alert(kind, severity=CRITICAL) for kind in builtin_kinds() if kind != crash]
    kept = inhibitors(others, [alert(crash, severity=CRITICAL)], default_inhibitions())

    assert sorted(kept) == sorted(ids(*(each for each in others if each.kind not in HEARTBEAT_KINDS)))


def test_a_heartbeat_is_kept_back_where_it_is_named():
    """Whoever wants that."""
    named = Inhibition(("nonfinite",), ("run_silent",))

    assert inhibitors([alert("run_silent")], [alert("nonfinite", severity=CRITICAL)], [named])


kinds = ("a", "b", "c", "d")
some_inhibitions = st.lists(
    st.builds(
        lambda order, n, m: Inhibition(tuple(order[:n]), tuple(order[n : n + m])),
        st.permutations(kinds),
        st.integers(1, 2),
        st.integers(0, 2),
    ),
    max_size=4,
)


@given(some_inhibitions, st.lists(st.sampled_from(kinds), min_size=1, unique=True))
def test_somebody_is_always_heard(inhibitions, present):
    """However inhibitions are configured: alerts cannot silence each other all."""
    alerts = [alert(kind, severity=CRITICAL) for kind in present]
    kept = inhibitors(alerts, alerts, inhibitions)

    assert len(kept) < len(alerts)


@given(some_inhibitions)
def test_what_is_kept_back_does_not_depend_on_the_order_of_alerts(inhibitions):
    """Two processes that read them differently agree."""
    alerts = [alert(kind, severity=CRITICAL) for kind in kinds[:3]]
    answers = [inhibitors(order, order, inhibitions) for order in permutations(alerts)]

    assert all(answer == answers[0] for answer in answers)
