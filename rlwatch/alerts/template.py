"""The commented ``rlwatch.toml`` that ``rlwatch rules init`` writes: the default rules, spelt out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rlwatch.alerts.policy import Inhibition, Policy
from rlwatch.alerts.rules import Rule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HEAD = """\
# Alert rules and channels of rlwatch. Check this file with: rlwatch rules test
# What it would have sent for a log: rlwatch rules test train.log
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

# Slack, Discord, Teams, Telegram, Feishu, Lark, DingTalk, WeCom, PagerDuty, e-mail (pip install
# 'rlwatch-monitor[notify]'), wandb and programs are channels too: docs/notifiers.md. Try them: rlwatch alerts test
# [notify.slack]
# url = "env:SLACK_URL"

# [notify.pager]                 # gets the message as JSON on its standard input; no shell
# kind = "command"
# argv = ["cat", "-"]
# pass_env = ["PAGER_TOKEN"]     # of the environment it sees only this, PATH, HOME and the like

# What a rule may say (steps are the trainer's step numbers, not rows and not seconds):
#   kinds, except_kinds, detectors   which findings it is about; none named: all
#   min_severity                     "info", "warning" (default) or "critical"
#   for_steps                        fires when the condition has held for so many steps
#   for_critical                     the same for critical findings
#   keep_firing_for                  resolves when it has been gone for so many steps
#   severity                         overrides the finding's
#   channels                         who is told; [] records the alert and tells nobody
#   labels                           free text for receivers, as in { team = "rl" }
#   repeat_minutes                   said again so often until it is over or acknowledged; 0: told once
#   escalate_after_minutes, escalate_after_steps
#                                    when nobody acknowledges it (rlwatch alerts ack ID) for so long ...
#   escalate_to, escalate_severity   ... these channels are told too, at this severity
#   only_live                        repeats and escalates only while the run is live (default true)
"""

QUIET = """
# Alerts that begin together are one message: of a "run", of a "project", or "none" (each its own).
# wait_s: seconds an alert waits for others of its group; 0: those of one step.
[grouping]
by = {by}
wait_s = {wait_s}

# When people sleep, only what is as bad as let_through is told; the rest afterwards, if it still holds.
# [[quiet_hours]]
# from = "22:00"
# to = "07:00"
# time_zone = "Europe/Berlin"
# let_through = "critical"
# days = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"]   # on which they begin

# While an alert of "when" fires (at min_severity or worse), those of "mutes" on the same run are kept back, up to
# the severity up_to. They come later if they go on without it, for as many steps as their rule's for_steps or
# keep_firing_for, whichever is more. No mutes: all others. inhibit = [] turns this off.
"""

ACTIONS = """
# What may be done to a live run without asking anybody. Nothing, unless written here; and only tried out (an event
# says what would have been asked) while dry_run is true. do, args: a command as 'rlwatch command' takes it.
# A reset of the reference upon a collapse is refused: it would make the collapsing policy the anchor.
# [[actions]]
# name = "reset when due"
# kinds = ["kl_saturation", "reset_due"]
# do = "reset-reference"
# args = { optimizer = "keep" }
# min_severity = "warning"
# cooldown_steps = 200
# most = 3            # in the life of a run
# dry_run = true
"""


def default_toml() -> str:
    """The file's text. Loading it gives the default rules."""
    usual = Policy()
    parts = [QUIET.format(by=_text(usual.grouping.by.value), wait_s=_text(usual.grouping.wait_s))]
    parts += [_table("inhibit", inhibition, _LIKE) for inhibition in usual.inhibitions]
    return HEAD + "\n".join([*parts, *(rule_toml(rule) for rule in usual.rules)]) + ACTIONS


def rule_toml(rule: Rule) -> str:
    """One ``[[rules]]`` table, without what is default anyway.

    >>> print(rule_toml(Rule("mine", kinds=("kl_drift",), for_steps=5)))
    [[rules]]
    name = "mine"
    kinds = ["kl_drift"]
    for_steps = 5
    <BLANKLINE>
    """
    return _table("rules", rule, Rule(rule.name), always=("name",))


_LIKE = Inhibition(("x",))
"""An inhibition with nothing but defaults, except for what it must name."""


def _table(name: str, thing: DataclassInstance, plain: DataclassInstance, always: Sequence[str] = ()) -> str:
    """``[[name]]`` with what ``thing`` says beyond ``plain``."""
    values = {f.name: getattr(thing, f.name) for f in fields(thing)}
    said = {key: value for key, value in values.items() if key in always or value != getattr(plain, key)}
    return "\n".join([f"[[{name}]]", *(f"{key} = {_toml(value)}" for key, value in said.items()), ""])


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_text(k)} = {_text(v)}" for k, v in value.items()) + " }"
    return _text(list(value) if isinstance(value, tuple) else value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML knows no surrogate pairs
