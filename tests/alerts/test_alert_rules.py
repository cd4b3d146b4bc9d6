"""Rules: what they match, what they refuse, and what the default ones say."""

from __future__ import annotations

import math
import re

import pytest
from alert_examples import CRITICAL, INFO, WARNING, finding, told

from rlwatch.alerts.engine import AlertEngine
from rlwatch.alerts.rules import HEARTBEAT_KINDS, Rule, builtin_kinds, default_rules, unknown_kinds
from rlwatch.errors import ConfigError
from rlwatch.records import Severity


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": ""}, "''"),
        ({"name": "a|b"}, r"'a\|b'"),
        ({"name": 3}, "got 3"),
        ({"for_steps": -1}, "for_steps.*-1"),
        ({"for_steps": 2.5}, "for_steps.*2.5"),
        ({"for_steps": True}, "for_steps.*True"),
        ({"for_steps": None}, "for_steps.*None"),
        ({"keep_firing_for": math.nan}, "keep_firing_for.*nan"),
        ({"for_critical": 5}, "for_critical.*5"),
        ({"min_severity": "awful"}, "min_severity.*'awful'"),
        ({"min_severity": None}, "min_severity.*None"),
        ({"severity": "page"}, "severity.*'page'"),
        ({"kinds": "nonfinite"}, "kinds.*'nonfinite'"),
        ({"kinds": ("",)}, "kinds.*''"),
        ({"channels": (1,)}, "channels.*1"),
        ({"labels": {"team": 1}}, "labels.*'team': 1"),
        ({"labels": ["a"]}, "labels"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_the_value(values: dict, said: str):
    """At construction, not in the loop."""
    with pytest.raises(ConfigError, match=said):
        Rule(**({"name": "r"} | values))


def test_lists_and_plain_words_are_taken_as_what_they_mean():
    """As they come from a file."""
    rule = Rule("r", kinds=["kl_drift"], min_severity="critical", severity="info", channels=[])

    assert (rule.kinds, rule.min_severity, rule.severity, rule.channels) == (("kl_drift",), CRITICAL, INFO, ())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule("r"), True),
        (Rule("r", kinds=("kl_drift",)), False),
        (Rule("r", kinds=("kl_drift", "entropy_collapse")), True),
        (Rule("r", except_kinds=("entropy_collapse",)), False),
        (Rule("r", detectors=("entropy",)), True),
        (Rule("r", detectors=("kl",)), False),
        (Rule("r", min_severity=CRITICAL), False),
    ],
)
def test_a_rule_is_about_the_findings_it_names(rule: Rule, expected: bool):
    """Kind, detector and severity must all fit."""
    assert expected == rule.matches(finding("entropy_collapse", WARNING))


def test_a_kind_that_nothing_reports_is_noticed():
    """A typing mistake would be a rule that never fires."""
    assert (unknown_kinds([Rule("r", kinds=("entropy_colapse", "kl_drift"))])) == [
        "rule 'r' names the kind 'entropy_colapse', which no detector reports; did you mean 'entropy_collapse'?"
    ]
    assert "known kinds" in unknown_kinds([Rule("r", except_kinds=("zzz",))])[0]
    assert unknown_kinds(default_rules()) == []


@pytest.mark.parametrize("kind", [*builtin_kinds(), "my_own_kind"])
def test_each_kind_belongs_to_exactly_one_default_rule(kind: str):
    """No finding is told twice, none is lost."""
    about = [rule for rule in default_rules() if rule.matches(finding(kind, CRITICAL))]

    assert len(about) == 1


def test_every_kind_that_can_be_published_has_a_rule_of_its_family():
    """``other`` is for detectors of one's own; five kinds are only ever information."""
    named = [kind for rule in default_rules() for kind in rule.kinds]

    remarks = {"clip_uninformative", "plateau", "reward_uninformative", "tool_slow", "verifier_slow"}
    assert sorted(named) == sorted(set(builtin_kinds()) - remarks)


@pytest.mark.parametrize("kind", [k for k in builtin_kinds() if k not in ("kl_saturation", "reset_due")])
def test_by_default_a_critical_finding_is_published_at_its_first_step(kind: str):
    """Nobody waits for a collapse to last."""
    transitions = told(AlertEngine("r", default_rules()), [(50, [finding(kind, CRITICAL, step=50)])])

    assert [t.notify for t in transitions] == [True]


EVENTS = ("silent_reference_reset", "lost_reference_reset")
"""Kinds that are something that happened: there is nothing that would have to last."""


@pytest.mark.parametrize("kind", EVENTS)
def test_by_default_what_happened_is_published_at_once_and_once(kind: str):
    """A reference that moved unannounced."""
    run = [(s, [finding(kind, WARNING, step=s)] if 50 <= s < 60 else []) for s in range(300)]
    notified = [(t.event.value, t.alert.step) for t in told(AlertEngine("r", default_rules()), run) if t.notify]

    assert notified == [("firing", 50), ("resolved", 80)]


AT_ONCE = (*EVENTS, *HEARTBEAT_KINDS, "stalled_steps")
"""Kinds that no step has to go by for: while a counter stands, none does."""


@pytest.mark.parametrize("kind", [kind for kind in builtin_kinds() if kind not in AT_ONCE])
def test_by_default_a_warning_of_one_step_tells_nobody(kind: str):
    """A run that is fine sends nothing, even if a detector blinks every 30 steps."""
    run = [(s, [finding(kind, WARNING, step=s)] if s % 30 == 0 else []) for s in range(300)]

    assert [t for t in told(AlertEngine("r", default_rules()), run) if t.notify] == []


def test_by_default_a_warning_that_lasts_is_published_once_and_its_end_once():
    """With rows ten steps apart, too."""
    run = [(s, [finding(step=s)] if 100 <= s < 200 else []) for s in range(0, 400, 10)]

    notified = [(t.event.value, t.alert.step) for t in told(AlertEngine("r", default_rules()), run) if t.notify]

    assert notified == [("firing", 110), ("resolved", 220)]


def test_by_default_info_tells_nobody():
    """Info is for the page; healthy runs have it, too."""
    run = [(s, [finding(kind, Severity.INFO, step=s) for kind in builtin_kinds()]) for s in range(100)]

    assert told(AlertEngine("r", default_rules()), run) == []


def test_a_kind_that_no_default_rule_names_is_the_rule_for_others():
    """A new detector alerts before anybody thought of a rule for it."""
    named = {kind for rule in default_rules() for kind in rule.kinds}

    assert {rule.name for rule in default_rules() if rule.matches(finding("brand_new", CRITICAL))} == {"other"}
    assert set(default_rules()[-1].except_kinds) == named


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"repeat_minutes": -1}, "repeat_minutes must be a number of minutes >= 0, got -1"),
        ({"repeat_minutes": "4h"}, "repeat_minutes must be a number of minutes >= 0, got '4h'"),
        ({"repeat_minutes": math.inf}, "repeat_minutes must be a number of minutes >= 0, got inf"),
        ({"escalate_after_steps": 1.5, "escalate_to": ("x",)}, "escalate_after_steps must be a number of steps >= 0"),
        ({"escalate_after_minutes": 5}, "it escalates, but to no channel and no severity: set escalate_to"),
        ({"escalate_to": ("pager",)}, "it sets how to escalate, not when: set escalate_after_minutes"),
        ({"escalate_severity": "critical"}, "it sets how to escalate, not when"),
        ({"escalate_severity": "fatal", "escalate_after_steps": 1}, "must be info, warning or critical, got 'fatal'"),
        ({"escalate_to": "pager", "escalate_after_steps": 1}, "escalate_to must be a list of names, got 'pager'"),
        ({"only_live": "yes"}, "only_live must be true or false, got 'yes'"),
    ],
)
def test_a_wrong_value_is_refused_with_the_key_and_what_was_got(wrong: dict, said: str):
    """And what to do, where that is not plain."""
    with pytest.raises(ConfigError, match=re.escape(said)) as refusal:
        Rule("r", **wrong)

    assert "rule 'r'" in str(refusal.value)
