"""Sentences, evidence and HTML: text that stays text."""

import re

from app_world import WEIRD, alert
from hypothesis import given
from hypothesis import strategies as st
from rlwatch_app import format as fmt
from rlwatch_app import health, markup
from rlwatch_app.health import judge

from rlwatch.control.liveness import Pace
from rlwatch.records import AlertState, RunInfo
from rlwatch.state import verdict_of

NOW = 1_000_000.0


def test_why_tells_what_fires_in_the_order_it_began():
    """Cause before effect, as far as time tells."""
    told = health.firing_clauses([alert(onset_step=4690), alert(kind="mismatch_growth", onset_step=4410)])
    assert told == [
        "trainer and rollout engine drift apart from step 4\u202f410",
        "entropy collapse from step 4\u202f690",
    ]


def test_why_is_silent_about_what_is_over():
    """Resolved and pending alerts are not the reason now."""
    assert health.firing_clauses([alert(state=AlertState.RESOLVED), alert(state=AlertState.PENDING)]) == []


def test_two_rules_on_one_kind_are_one_clause():
    """A person reads about failures, not about rules."""
    assert len(health.firing_clauses([alert(rule="a", onset_step=9), alert(rule="b", onset_step=7)])) == 1


def test_the_ending_of_a_silence():
    """What happened last belongs to the sentence."""
    well = verdict_of((), {})
    silent = RunInfo("r", last_step=7, last_ts=NOW - 7200, created_at=NOW)
    assert "no step for 2" in health.ending_words(silent, judge(silent, well, NOW), NOW, Pace(1.0))
    live = RunInfo("r", last_step=7, last_ts=NOW, created_at=NOW)
    assert health.ending_words(live, judge(live, well, NOW), NOW, Pace(1.0)) == ""


def test_the_last_alarm_is_remembered_when_all_is_well():
    """With its span."""
    assert health.last_alarm_words([alert(state=AlertState.RESOLVED, resolved_step=40)]) == (
        "entropy collapse from step 12, resolved at step 40"
    )
    assert (
        health.last_alarm_words([]) == health.last_alarm_words([alert(state=AlertState.RESOLVED, fired_at=None)]) == ""
    )


@given(st.text(), st.text())
def test_no_text_becomes_markup(child, attribute):
    """Whatever a run is called, the page has exactly the tags we made."""
    html = markup.el("div", markup.el("b", child, title=attribute), child)
    assert re.findall(r"<[^>]*", html)[0] == "<div"
    assert len(re.findall(r"<", html)) == 4


def test_a_script_in_a_name_is_shown_not_run():
    """The name from the brief of every attacker."""
    assert "<script" not in markup.el("div", WEIRD)
    assert "&lt;script&gt;" in markup.el("div", WEIRD)


def test_evidence_reads_as_numbers_do_everywhere():
    """Three digits, NaN by name, lists and tables without brackets."""
    body = {"kl_before": 0.31234, "steps": 12480, "bad": float("nan"), "layers": [1, 2], "ok": True, "none": None}
    assert fmt.evidence_lines(body) == [
        ("kl before", "0.312"),
        ("steps", "12\u202f480"),
        ("bad", "NaN"),
        ("layers", "1, 2"),
        ("ok", "yes"),
        ("none", "none"),
    ]


def test_a_huge_body_is_one_short_line():
    """An event may carry a stack trace."""
    line = fmt.evidence_line({"trace": "line\n" * 500})
    assert len(line) <= 400
    assert "\n" not in line
