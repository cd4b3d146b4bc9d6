"""What a post-mortem is made of: of a run in a store, of a log; thinned, without secrets, and saying what is missing."""

import math
import re

import numpy as np
import pytest

from rlwatch.diagnosis import Confidence
from rlwatch.importers.base import ImportedRun
from rlwatch.metrics import BY_NAME
from rlwatch.ports import Series
from rlwatch.records import CULPRITS, Event, Finding, RunInfo, RunState, Severity, SpikeBatch, StepRecord
from rlwatch.report import facts_of_report, facts_of_run, html, markdown
from rlwatch.report.gather import BUCKETS, USUAL, curve, metrics_to_draw, missing, shown
from rlwatch.scanner import replay
from rlwatch.store.url import open_store

NOW = 1_750_000_000.0


def series(values, steps=None, attempts=None):
    steps = np.arange(len(values)) if steps is None else np.array(steps)
    attempts = np.ones(len(values)) if attempts is None else np.array(attempts)
    return Series("x", steps.astype(np.int64), np.array(values, dtype=np.float64), attempts.astype(np.int64), steps)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


def crashed(store, steps=120):
    """A run whose entropy and reward fall from step 60, with a localised spike and a secret in its configuration."""
    config = {"optim": {"lr": 1e-6}, "hub_token": "hf_s3cret", "webhook_url": "https://hooks.x/T0/s3cret"}
    writer = store.open_run(RunInfo("r1", "math", "seed <3>", "trl/grpo", NOW, config))
    for step in range(1, steps + 1):
        level = 1.0 if step < 60 else max(0.02, 1.0 - (step - 60) / 30)
        noise = 0.01 * math.sin(7 * step)
        metrics = {"reward": 0.6 * level + noise, "entropy": 0.5 * level + noise, "grad_norm": 1.0 + noise}
        writer.write([StepRecord(step, metrics, NOW + step, seq=step)])
    found = [
        Finding(
            "e", "entropy_collapse", Severity.CRITICAL, 80, 60, "entropy fell", metric="policy/entropy", baseline=0.5
        ),
        Finding("r", "reward_drop", Severity.CRITICAL, 90, 75, "reward fell", metric="reward/mean", baseline=0.6),
    ]
    columns = {"text": ["<b>∑</b>"], "share": np.array([0.8]), "token_id": np.array([7]), "cause": ["token ratio"]}
    localised = Event("gradient_localised", 58, {"message": "token '∑' carries 80 %"}, NOW, seq=steps + 1)
    writer.write([*found, localised, SpikeBatch(58, columns, CULPRITS, NOW)])
    writer.finish(RunState.CRASHED, "ValueError: hush", NOW + steps)
    writer.close()
    return "r1"


def test_a_crashed_run_tells_its_story(store):
    """Cause, timeline, charts with levels, culprits, and what was not measured."""
    facts = facts_of_run(store, crashed(store), now=NOW)

    assert facts.status == "crashed"
    assert facts.diagnosis.causes[0].kind == "entropy_collapse"
    assert facts.diagnosis.causes[0].sure is Confidence.PLAUSIBLE
    assert [m.step for m in facts.timeline if m.number] == [60, 75]
    assert "token '∑' carries 80 %" in next(m.text for m in facts.timeline if m.step == 58)
    assert [c.name for c in facts.charts][:3] == ["reward/mean", "policy/entropy", "optim/grad_norm"]
    assert facts.charts[1].baseline == 0.5
    assert facts.culprits[0]["text"] == "<b>∑</b>"
    assert any(line.startswith("mismatch growth: needs") for line in facts.missing)


def test_no_secret_of_the_configuration_is_in_the_report(store):
    """By its name, and as the path of an address."""
    facts = facts_of_run(store, crashed(store), now=NOW)

    for page in (html(facts), markdown(facts)):
        assert "s3cret" not in page
        assert "optim.lr" in page.replace("\\", "")
        assert "&lt;b&gt;∑&lt;/b&gt;" in page


def test_configurations_are_flat_and_redacted():
    """Addresses with a user too; harmless names stay."""
    config = {"a": {"b": [1, "x"]}, "db": "postgresql://u:pw@h/d", "pad_token": "<pad>", "url": "http://h/v1"}

    assert shown(config) == {
        "a.b": "[1, x]",
        "db": "postgresql://[redacted]@h/d",
        "pad_token": "<pad>",
        "url": "http://h/v1",
    }


def test_an_empty_run_has_a_report(store):
    """Opened and never written to."""
    store.open_run(RunInfo("r0", created_at=NOW)).close()
    facts = facts_of_run(store, "r0", now=NOW)

    assert facts.charts == ()
    assert "No warning or critical findings" in html(facts)


def test_a_run_of_nothing_but_nan_has_a_report(store):
    """Values that are not finite are ticks, named, and break nothing."""
    writer = store.open_run(RunInfo("r2", source="trl/grpo", created_at=NOW))
    values = [math.nan, math.inf, -math.inf]
    writer.write([StepRecord(s, {"reward": values[s % 3], "entropy": math.nan}, NOW, seq=s) for s in range(1, 30)])
    writer.close()
    facts = facts_of_run(store, "r2", now=NOW)

    assert "-Inf, Inf, NaN" in html(facts)
    assert "not finite, first at step 1" in markdown(facts)


def test_a_log_has_a_report_too():
    """From its replay, without a store."""
    records = [
        StepRecord(s, {"reward": 0.5, "entropy": 0.6 if s < 50 else math.nan, "grad_norm": 1.0}) for s in range(80)
    ]
    imported = ImportedRun(name="seed3", source="trl/grpo", format="csv", path="x.csv", records=records)
    facts = facts_of_report(replay(imported), imported, now=NOW)

    assert facts.title == "seed3"
    assert facts.status == "collapsed@50"
    assert facts.diagnosis.causes[0].kind == "nonfinite"
    assert "NaN or infinity at step" in facts.head["alarms"]


def test_a_curve_keeps_every_spike():
    """Thinned to what a picture has columns for, extremes always there."""
    values = np.sin(np.arange(100_000) / 50)
    values[31_337] = 99.0
    values[77_777] = -99.0
    thinned = curve(series(values), {1: 0})

    assert len(thinned.steps) <= 2 * BUCKETS + 2
    assert (31_337, 99.0) in zip(thinned.steps, thinned.values, strict=True)
    assert (77_777, -99.0) in zip(thinned.steps, thinned.values, strict=True)
    assert (thinned.steps[0], thinned.steps[-1]) == (0, 99_999)


def test_a_hundred_thousand_nans_are_few_ticks():
    """One of each kind for each stretch."""
    thinned = curve(series([math.nan] * 100_000), {1: 0})

    assert thinned.steps == ()
    assert 1 < len(thinned.bad) <= BUCKETS + 2


def test_steps_that_were_run_again_are_left_out_and_counted():
    """The newest branch is the run."""
    one = series([1.0, 2.0, 3.0, 9.0, 8.0], steps=[1, 2, 3, 2, 3], attempts=[1, 1, 1, 2, 2])
    drawn = curve(one, {1: 1, 2: 2})

    assert (drawn.steps, drawn.values) == ((1, 2, 3), (1.0, 9.0, 8.0))
    assert drawn.replaced == 2


def test_what_is_drawn_of_any_run_is_vital_or_has_a_panel():
    """The table of metrics says which are: a post-mortem must not leave out what the dashboard always shows."""
    vital = {metric.name for metric in BY_NAME.values() if metric.vital}

    assert vital <= set(USUAL)
    assert all(BY_NAME[name].panel is not None for name in USUAL)
    assert len(set(USUAL)) == len(USUAL)


def test_metrics_findings_speak_of_are_drawn_first():
    """After the reward; the closest reading of each, nine at most."""
    found = [Finding("d", "length_explosion", Severity.CRITICAL, 9, 8, "", metric="len/clipped")]
    names = ["reward", "entropy", "completions/clipped_ratio", "kl", "grad_norm", *(f"my/{n}" for n in range(300))]

    assert metrics_to_draw(names, "trl/grpo", found)[:3] == ["reward", "completions/clipped_ratio", "entropy"]
    assert len(metrics_to_draw(names, "trl/grpo", found)) <= 9


def test_what_was_not_measured_names_what_would_be_needed():
    """Silence of a detector without its metrics is no health."""
    lines = missing({"reward/mean", "policy/entropy"})

    assert not any(line.startswith("reward drop:") for line in lines)
    assert any(re.match(r"grad spike: needs optim/grad_norm", line) for line in lines)
    assert any("others" in line for line in lines)
    assert max(map(len, lines)) < 300
    assert missing(set()) == ()
