"""A chance is shown only of logs of a kind on which the forecaster has shown skill; elsewhere what can be checked is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow.parquet
import pytest

from rlwatch.errors import ConfigError
from rlwatch.forecast import Forecaster, gate
from rlwatch.forecast.forecast import (
    ForecastKind,
    alarm_message,
    forecast_of,
    forecast_sentence,
    line_sentence,
    record_of,
)
from rlwatch.forecast.forecaster import default_forecaster, falsified
from rlwatch.forecast.gate import (
    GAINS,
    NO_SIGNAL,
    PER_TOKEN,
    Evidence,
    LogClass,
    caveat,
    class_of,
    measured,
    opens,
    skill_of,
    why_closed,
)
from rlwatch.forecast.signals import BY_SIGNAL
from rlwatch.records import ClosedStep
from rlwatch.testing.small_batches import small_run

SCALARS = frozenset({"reward", "entropy", "grad", "kl_ref", "length", "cut_off"})
SAMPLE = Path(__file__).parents[2] / "benchmarks" / "forecast" / "sample" / "sample.parquet"
TABLE = Path(gate.__file__).parent / "shipped" / "skill.json"


def shown(people: str = "other people", evidence: Evidence = Evidence.OTHERS, **changes: object) -> bool:
    """Whether chances are shown by a line of the table that shows them, but for these changes."""
    at = {"runs": 100, "failures": 30, "calibration_error": 0.03, **{name: [0.1, 0.02, 0.2] for name in GAINS}}
    return skill_of({"people": people, "within 50 steps": {**at, **changes}}).shown(evidence)


def test_chances_are_shown_where_both_simple_tools_are_beaten_for_sure_and_chances_hold() -> None:
    """AUROC and Brier skill over a clock and over a line, intervals above zero; calibrated; failures enough."""
    assert shown()
    assert not any(shown(**{name: [0.1, -0.01, 0.2]}) for name in GAINS)
    assert not shown(calibration_error=0.06)
    assert not shown(failures=7)
    assert not shown(auroc_over_line=None)
    assert not skill_of({"people": "other people", "within 50 steps": None}).shown()


def test_skill_on_our_own_runs_shows_a_chance_only_to_an_owner_who_accepts_them() -> None:
    """Skill on other people's runs shows it to all; no skill to nobody."""
    assert not shown("rlwatch, recipes held out")
    assert shown("rlwatch, recipes held out", Evidence.OWN)
    assert shown(evidence=Evidence.OWN)
    assert not shown("rlwatch, recipes held out", Evidence.OWN, calibration_error=0.06)


def test_each_kind_of_log_is_decided_by_one_line_of_the_table() -> None:
    """And by other people's runs where there are any of its kind."""
    table = json.loads(TABLE.read_text())["classes"]
    deciding = {row["class"]: row for row in table if row["decides"]}

    assert set(deciding) == set(LogClass) == set(measured())
    others = {row["class"] for row in table if row["people"] == "other people"}
    assert all(deciding[kind]["people"] == "other people" for kind in others)
    assert not any(map(opens, LogClass))  # no class has been proven on other people's runs
    assert [kind for kind in LogClass if opens(kind, Evidence.OWN)] == [LogClass.TAPS]
    assert [kind for kind in LogClass if caveat(kind)] == [LogClass.TAPS]
    assert why_closed(LogClass.TAPS) == f"{NO_SIGNAL} on other people's runs"
    assert {why_closed(kind) for kind in LogClass if kind is not LogClass.TAPS} == {NO_SIGNAL}
    assert not opens("", Evidence.OWN)


@pytest.mark.parametrize(
    ("signals", "every", "unsure", "kind"),
    [
        (SCALARS, 1.0, 0.1, LogClass.FINE),
        (SCALARS | PER_TOKEN, 1.0, 0.1, LogClass.TAPS),
        (SCALARS | PER_TOKEN, 1.0, 0.4, LogClass.TAPS_SMALL),
        (SCALARS | PER_TOKEN, 1.0, math.nan, LogClass.TAPS),
        (SCALARS | PER_TOKEN, 5.0, 0.1, LogClass.COARSE),
        (SCALARS, 10.0, 0.1, LogClass.SPARSE),
        (SCALARS | {"logp_min"}, 1.0, 0.1, LogClass.FINE),
    ],
)
def test_the_kind_of_a_log_is_a_property_of_what_it_holds(signals, every, unsure, kind) -> None:
    """Never of how well the run does."""
    assert class_of(frozenset(signals), every, unsure) is kind


def tapped() -> list[ClosedStep]:
    """Steps of a failing run of the sample that ships: logged per token, in batches that are not small."""
    of_one = [("run", "==", "advantage_shift-1-0006")]
    rows = pyarrow.parquet.read_table(SAMPLE, filters=of_one).to_pylist()
    metrics = [{name: value for name, value in row.items() if isinstance(value, float)} for row in rows]
    return [ClosedStep(row["step"], values) for row, values in zip(rows, metrics, strict=True)]


def test_a_log_per_token_is_given_a_chance_only_where_the_owner_accepts_our_own_runs(monkeypatch) -> None:
    """With the caveat that only these have proven it, also in what is stored; by default there is the reason."""
    rows = tapped()
    closed = default_forecaster().extend(rows)
    monkeypatch.setenv("RLWATCH_FORECAST_EVIDENCE", "own")
    opened = default_forecaster().extend(rows)

    assert not any(f.shown or f.alarm for f in closed)
    assert {f.reason for f in closed if not f.absent} == {f"{NO_SIGNAL} on other people's runs"}
    assert any(f.alarm for f in opened)
    shown = [forecast_of(record_of(f, row)) for f, row in zip(opened, rows, strict=True) if f.shown]
    assert {f.caveat for f in shown} == {"proven on rlwatch's own small models, not on other people's runs"}
    assert all(forecast_sentence(f).endswith(f.caveat) and alarm_message(f).endswith(f.caveat) for f in shown)
    assert [f.p50 for f in shown] == [f.p50 for f in Forecaster().extend(rows) if f.shown]


def test_evidence_of_nobody_is_refused(monkeypatch) -> None:
    """With both names that there are."""
    monkeypatch.setenv("RLWATCH_FORECAST_EVIDENCE", "mine")
    with pytest.raises(ConfigError, match="RLWATCH_FORECAST_EVIDENCE must be 'others' or 'own', got 'mine'"):
        default_forecaster()


def test_what_makes_a_log_one_per_token_are_signals_that_are_read() -> None:
    """A signal that is renamed would close the gate silently."""
    assert set(BY_SIGNAL) >= PER_TOKEN


@pytest.mark.parametrize("every", [1, 5])
def test_a_log_of_averages_is_given_no_chance_and_no_alarm(every: int) -> None:
    """Whatever the model computes; what is stored and read again says why."""
    rows = [ClosedStep(row.step, row.metrics) for row in small_run(1003, failure="cut", every=every).rows]
    gated, raw = Forecaster(gate=Evidence.OTHERS).extend(rows), Forecaster().extend(rows)

    assert any(forecast.p50 is not None for forecast in raw)
    assert not any(f.p50 is not None or f.risk is not None or f.alarm or f.shown for f in gated)
    assert {f.kind for f in gated if not f.absent} == {ForecastKind.LIMIT}
    assert {f.reason for f in gated if not f.absent} == {NO_SIGNAL}
    again = [forecast_of(record_of(f, row)) for f, row in zip(gated, rows, strict=True)]
    assert [(f.kind, f.reason, f.checks, f.log) for f in again] == [(f.kind, f.reason, f.checks, f.log) for f in gated]


def falling(step: int) -> dict[str, float]:
    """Rewards at a level and an entropy that falls on a straight line of its logarithm, from step 60 on."""
    wiggle = 0.01 * math.sin(2.4 * step)
    entropy = 1.5 * math.exp(-0.008 * max(step - 60, 0) + wiggle)
    return {"reward/mean": 0.4 + wiggle, "reward/std": 0.4, "policy/entropy": entropy, "optim/grad_norm": 1.0 + wiggle}


def test_the_time_to_a_limit_is_told_with_how_far_out_such_lines_were() -> None:
    """A line that holds has been out by few steps, checked once a row after twenty; the arrival is that of the run."""
    rows = [ClosedStep(step, falling(step)) for step in range(200)]
    told = [f for f in Forecaster(gate=Evidence.OTHERS).extend(rows) if f.steps_to is not None and f.checks >= 10]

    reached = 60 + math.log(5.0) / 0.008
    assert len(told) > 30
    late = told[-1]
    assert late.limit == "ent_low"
    assert late.step + late.steps_to == pytest.approx(reached, abs=15)
    assert late.error is not None
    assert late.error < 10
    assert f"{late.checks} checked so far: out by {late.error:.0f} steps" in line_sentence(late)
    assert forecast_sentence(late).startswith(NO_SIGNAL)


def test_a_line_that_its_own_quantity_has_falsified_is_not_told() -> None:
    """Where lines were out by more than the time that this one gives, checked often enough."""
    assert falsified(30.0, 31.0, 5)
    assert not falsified(30.0, 31.0, 2)
    assert not falsified(30.0, 20.0, 5)
    assert not falsified(30.0, None, 0)


def test_what_watches_a_run_is_gated_unless_the_model_is_ones_own(monkeypatch, tmp_path) -> None:
    """A model of one's own was judged on one's own runs."""
    rows = [ClosedStep(row.step, row.metrics) for row in small_run(1003, failure="cut").rows][:80]
    assert not any(f.shown for f in default_forecaster().extend(rows))

    shipped = TABLE.parent
    for name in ("hazard.json", "hazard.sha256"):
        (tmp_path / name).write_bytes((shipped / name).read_bytes())
    monkeypatch.setenv("RLWATCH_FORECAST_MODEL", str(tmp_path / "hazard.json"))
    assert any(f.shown for f in default_forecaster().extend(rows))
