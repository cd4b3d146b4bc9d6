"""docs/alerts.md says what is so."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from rlwatch.alerts.config import load_config
from rlwatch.alerts.engine import AlertEvent
from rlwatch.alerts.rules import HEARTBEAT_KINDS, REPEAT_MINUTES, AlertingConfig, QuietHours, Rule, default_rules
from rlwatch.control import liveness

GUIDE = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text(encoding="utf-8")
TOML = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)


def test_its_tables_are_valid_and_say_what_applies_anyway(tmp_path: Path):
    """But for the quiet hours, which are nobody's default."""
    (tmp_path / "rlwatch.toml").write_text("\n".join(TOML))
    policy = load_config(tmp_path / "rlwatch.toml", env={}).policy

    assert policy.grouping == AlertingConfig().grouping
    assert [type(hours) for hours in policy.quiet_hours] == [QuietHours]
    assert policy.inhibitions[0] in AlertingConfig().inhibitions


def test_every_key_of_a_rule_and_every_event_is_explained():
    """A new one must be."""
    words = set(re.findall(r"`(\w+)`", GUIDE))

    assert {field.name for field in fields(Rule)} - words == {"name"}
    assert {event.value for event in AlertEvent} <= words
    assert set(HEARTBEAT_KINDS) <= words


def test_its_figures_are_those_of_the_code():
    """Defaults, and what silence is."""
    family = default_rules()[0]

    assert (family.for_steps, family.for_critical, family.keep_firing_for) == (10, 0, 20)
    assert (REPEAT_MINUTES, liveness.FACTOR, liveness.FLOOR_S, liveness.UNKNOWN_S) == (240.0, 5.0, 120.0, 600.0)
    assert (liveness.LONGEST_FACTOR, liveness.TAIL) == (1.5, 64)


@pytest.mark.parametrize("line", re.findall(r"^rlwatch [^\n]*", GUIDE, re.MULTILINE))
def test_its_commands_exist(line: str):
    """As far as the group and the command."""
    import typer

    from rlwatch.cli.app import app

    words = [word for word in shlex.split(line, comments=True)[1:] if not word.startswith("-")]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]

    assert command.name not in ("rlwatch", "rules")
