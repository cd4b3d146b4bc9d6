"""The commented ``rlwatch.toml`` that ``rlwatch rules init`` writes: the default rules, spelt out."""

from __future__ import annotations

import json
from dataclasses import fields

from rlwatch.alerts.rules import Rule, default_rules

HEAD = """\
# Alert rules and channels of rlwatch. Check this file with: rlwatch rules test
# A rule with the name of a default one replaces it; any other is added.
# default_rules = false          # only the rules of this file

# [store]
# url = "./rlwatch-runs"

# [dashboard]                    # alerts link to it
# url = "http://127.0.0.1:8501"

# A webhook gets signed JSON by POST. Secrets stay in the environment; RLWATCH_WEBHOOK_URL and
# RLWATCH_WEBHOOK_SECRET alone would do, too.
# [notify.webhook]
# url = "env:RLWATCH_WEBHOOK_URL"
# secret = "env:RLWATCH_WEBHOOK_SECRET"
# total_s = 10.0                 # seconds a delivery may take

# [notify.oncall]                # another channel, for rules that name it
# kind = "webhook"
# url = "env:ONCALL_URL"

# What a rule may say (steps are the trainer's step numbers, not rows and not seconds):
#   kinds, except_kinds, detectors   which findings it is about; none named: all
#   min_severity                     "info", "warning" (default) or "critical"
#   for_steps                        fires when the condition has held for so many steps
#   for_critical                     the same for critical findings
#   keep_firing_for                  resolves when it has been gone for so many steps
#   severity                         overrides the finding's
#   channels                         who is told; [] records the alert and tells nobody
#   labels                           free text for receivers, as in { team = "rl" }
"""


def default_toml() -> str:
    """The file's text. Loading it gives the default rules."""
    return HEAD + "".join(f"\n{rule_toml(rule)}" for rule in default_rules())


def rule_toml(rule: Rule) -> str:
    """One ``[[rules]]`` table, without what is default anyway.

    >>> print(rule_toml(Rule("mine", kinds=("kl_drift",), for_steps=5)))
    [[rules]]
    name = "mine"
    kinds = ["kl_drift"]
    for_steps = 5
    <BLANKLINE>
    """
    plain = Rule(rule.name)
    said = {f.name: getattr(rule, f.name) for f in fields(rule) if getattr(rule, f.name) != getattr(plain, f.name)}
    lines = [f"{key} = {_toml(value)}" for key, value in ({"name": rule.name} | said).items()]
    return "\n".join(["[[rules]]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_text(k)} = {_text(v)}" for k, v in value.items()) + " }"
    return _text(list(value) if isinstance(value, tuple) else value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML knows no surrogate pairs
