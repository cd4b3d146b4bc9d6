"""Rows of the tables on a run's page, and the cells they are made of."""

import json

import pytest
from app_world import WEIRD, cells, finding
from rlwatch_app import alerts_page, fleet_rows, run_history, table
from rlwatch_app.health import LOOKS, Word

from rlwatch.records import Command, CommandStatus, Severity

NOW = 1_000_000.0


def command(**more):
    fields = {
        "command_id": "c",
        "run_id": "run-1",
        "kind": "reset-reference",
        "args": {"optimizer": "clear"},
        "requested_by": "ann@lab",
        "why": "KL saturated",
        "created_at": NOW - 120,
        "expires_at": NOW + 480,
        **more,
    }
    return Command(**fields)


def said(row):
    return cells({"cells": row.cells})


@pytest.mark.parametrize(
    ("more", "status", "shape"),
    [
        ({}, "queued", "◌"),
        ({"status": CommandStatus.CLAIMED}, "claimed", "◐"),
        ({"status": CommandStatus.DONE, "finished_step": 4816}, "done at step 4\u202f816", "✓"),
        ({"status": CommandStatus.REJECTED, "finished_step": 9}, "rejected at step 9", "✕"),
        ({"status": CommandStatus.REJECTED}, "rejected", "✕"),
        ({"status": CommandStatus.EXPIRED}, "expired: no trainer took it", "✕"),
        ({"expires_at": NOW - 1}, "expired: no trainer took it", "✕"),
    ],
)
def test_every_state_of_a_command_has_words_and_a_shape(more, status, shape):
    """Also the one the store does not know yet."""
    row = run_history.command_row(command(**more), NOW)
    assert row.cells[1]["text"] == status
    assert row.cells[1]["shape"] == shape


def test_a_command_says_who_why_when_and_how():
    """The audit, in one row."""
    row = run_history.command_row(command(force=True, result="KL 0.31 to 0"), NOW)
    assert said(row) == ["reset reference", "queued", "KL 0.31 to 0", "KL saturated", "ann@lab", "2\u202fmin ago"]
    assert row.cells[0]["sub"] == "optimizer clear, forced"
    assert len(row.cells) == len(run_history.COMMAND_COLUMNS)


def test_a_finding_row_opens_its_evidence():
    """Numbers, how far beyond its threshold, and which metric."""
    row = run_history.finding_row(finding())
    assert said(row)[:4] == ["critical", "entropy collapse", "12", "20"]
    assert row.cells[4]["lines"] == [
        ["entropy", "0.1"],
        ["ratio", "NaN"],
        ["threshold ratio", "4"],
        ["metric", "policy/entropy"],
    ]
    assert len(row.cells) == len(run_history.FINDING_COLUMNS)


def test_a_finding_without_numbers_has_nothing_to_open():
    """Plain text, no triangle."""
    bare = finding(evidence={}, score=None, metric="")
    assert run_history.finding_row(bare).cells[4]["lines"] == []


def test_two_findings_of_one_kind_open_apart():
    """Their keys differ: a refresh keeps open what was opened, and only that."""
    first, second = run_history.finding_row(finding(seq=1)), run_history.finding_row(finding(seq=2))
    assert first.cells[4]["key"] != second.cells[4]["key"]


@pytest.mark.parametrize("word", list(Word))
def test_a_word_carries_its_own_shape_and_colour(word):
    """The same on every page."""
    cell = table.word(word)
    assert (cell["text"], cell["shape"], cell["colour"]) == (word.value, LOOKS[word].shape, LOOKS[word].colour)


@pytest.mark.parametrize(
    ("severity", "word"),
    [(Severity.CRITICAL, Word.FAILING), (Severity.WARNING, Word.AT_RISK), (Severity.INFO, Word.HEALTHY)],
)
def test_a_severity_looks_like_what_it_makes_of_a_run(severity, word):
    """One shape to learn, not two."""
    assert table.severity(severity)["shape"] == LOOKS[word].shape
    assert table.severity(severity)["text"] == severity.value


@pytest.mark.parametrize(
    "cell",
    [
        table.text(WEIRD),
        table.word(Word.FAILING),
        table.run_link("r", WEIRD, WEIRD),
        table.spark([(0.0, 1.0)], [0.5]),
        table.details("k", WEIRD, [(WEIRD, WEIRD)]),
        table.marked(table.details("k", "x", []), "✓", "#000000"),
    ],
)
def test_every_cell_is_strict_json_of_a_kind_the_script_knows(cell):
    """What Python makes, the browser can draw."""
    script = (table.HERE / "table.js").read_text(encoding="utf-8")
    assert json.loads(json.dumps(cell, allow_nan=False))["kind"] in {
        "text",
        "word",
        "link",
        "spark",
        "details",
        "group",
    }
    assert cell["kind"] == "text" or f'"{cell["kind"]}"' in script


def test_the_stylesheet_knows_every_class_the_columns_use():
    """A misspelt class would be silent."""
    style = (table.HERE / "table.css").read_text(encoding="utf-8")
    columns = (
        *fleet_rows.FleetView(fleet_rows.COLUMNS, ['x']).heads(), *alerts_page.INCIDENT_COLUMNS,
        *run_history.FINDING_COLUMNS, *run_history.COMMAND_COLUMNS, *run_history.EVENT_COLUMNS
    )  # fmt: skip
    for name in {name for column in columns for name in column.style.split()}:
        assert f".{name}" in style, name
