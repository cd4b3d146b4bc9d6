"""Building notifiers by kind, and the one that writes to the log."""

from __future__ import annotations

import logging

import pytest

from rlwatch.errors import ConfigError
from rlwatch.notify.registry import ConsoleNotifier, build_notifier
from rlwatch.testing.notifier_contract import a_message


def test_a_notifier_is_built_by_the_word_for_its_kind():
    """Under the channel's own name."""
    oncall = build_notifier("webhook", "oncall", {"url": "https://h/x"})

    assert (type(oncall).__name__, oncall.name) == ("WebhookNotifier", "oncall")


def test_an_unknown_kind_is_refused_with_those_there_are():
    """A typing mistake is found at set-up."""
    with pytest.raises(ConfigError, match=r"no kind 'webhok'; there are command, console, .*webhook"):
        build_notifier("webhok", "w")


@pytest.mark.parametrize("options", [{}, {"url": "https://h/hush", "colour": "red"}, {"url": 5}])
def test_wrong_settings_are_refused_without_showing_them(options: dict):
    """Only their names."""
    with pytest.raises(ConfigError, match="'w'") as error:
        build_notifier("webhook", "w", options)

    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("event", "severity", "level"),
    [
        ("firing", "info", logging.INFO),
        ("firing", "warning", logging.WARNING),
        ("escalated", "critical", logging.ERROR),
        ("resolved", "critical", logging.INFO),
        ("firing", "unheard of", logging.WARNING),
    ],
)
def test_the_log_level_follows_the_severity(event: str, severity: str, level: int, caplog: pytest.LogCaptureFixture):
    """What ends is no longer an error."""
    caplog.set_level(logging.DEBUG, logger="rlwatch")

    ConsoleNotifier().deliver(a_message(event=event, alert={"severity": severity}, text="so\nit is"))

    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [("rlwatch", level, "so it is")]
