"""demo as a command; what it does is tested where it lives."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cli_helpers import Invoke

from rlwatch.demo import run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {"store": None, "ui": True, "exit": False, "model": "tiny"}),
        (
            ("--no-ui", "--exit", "--store", "runs", "--model", "smollm2"),
            {"store": "runs", "ui": False, "exit": True, "model": "smollm2"},
        ),
    ],
)
@pytest.mark.parametrize("code", [0, 1])
def test_options_and_exit_code_are_passed_on(
    arguments: tuple[str, ...], expected: dict[str, Any], code: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 if a promise was not kept."""
    given: dict[str, Any] = {}

    def main(**options: Any) -> int:
        given.update(options)
        return code

    monkeypatch.setattr(run, "main", main)

    assert invoke("demo", *arguments).exit_code == code
    assert given == expected


def test_without_trl_one_line_says_what_to_install(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo trains for real."""
    monkeypatch.setitem(sys.modules, "trl", None)

    result = invoke("demo")

    assert result.exit_code == 2
    assert "pip install 'rlwatch-monitor[trl]'" in result.stderr


def test_a_store_in_memory_is_refused(invoke: Invoke) -> None:
    """The trainer is another process."""
    result = invoke("demo", "--store", "memory://demo")

    assert result.exit_code == 2
    assert "must be a directory" in result.stderr


def test_ctrl_c_exits_130(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was doing."""

    def main(**options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "main", main)

    assert invoke("demo").exit_code == 130
