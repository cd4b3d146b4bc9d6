"""Notes at a step of a run: kept with their author, drawn in the charts, told to scripts, and part of the report."""

import json

import pytest
from app_world import boards, no_traceback, write_run
from rlwatch_app import incident_acts
from rlwatch_app.principal import NotPermittedError, Principal
from streamlit.testing.v1 import AppTest
from test_api import STATE, client, fits

from rlwatch.errors import ConfigError
from rlwatch.report import facts_of_run, markdown
from rlwatch.step_notes import LONGEST, add_step_note, remove_step_note, step_notes
from rlwatch.store.url import open_store

ANN = Principal("ann", "operator")


def run_page():
    """The page of run-1, for an operator."""

    def script():
        from rlwatch_app import layout
        from rlwatch_app.principal import Principal
        from rlwatch_app.run_page import page

        layout.principal = lambda: Principal("ann", "operator")
        page(lambda run_id, step: None)

    page = AppTest.from_function(script, default_timeout=30)
    page.query_params["run"] = "run-1"
    return page


def test_a_note_is_in_the_chart_the_report_and_the_answer_to_scripts_until_it_is_removed(store_dir):
    """At its step, with its author; the removal is in the audit, too."""
    write_run(store_dir)
    store = open_store(str(store_dir))
    late = add_step_note(store, "run-1", 20, "new data\nfrom here", by="ann")
    add_step_note(store, "run-1", 7, "<b>odd</b>", by="bob")

    page = run_page().run()
    assert no_traceback(page)
    marks = [mark for mark in json.loads(json.dumps(boards(page)["board-strip"]))["marks"] if mark["shape"] == "✎"]
    assert [(mark["step"], mark["text"], mark["more"]) for mark in marks] == [
        (7, "note by bob", "<b>odd</b>"), (20, "note by ann", "new data from here")
    ]  # fmt: skip
    said = fits(client().get("/api/runs/run-1/state"), STATE)["step_notes"]
    assert [(note["step"], note["by"]) for note in said] == [(7, "bob"), (20, "ann")]
    report = markdown(facts_of_run(store, "run-1", now=0.0))
    assert "note by ann: new data" in report
    assert "note by bob" in report

    remove_step_note(store, late, by="cid")
    assert [note.step for note in step_notes(store, "run-1")] == [7]
    assert [(entry.by, entry.act) for entry in store.audit("run-1")][-1] == ("cid", "remove-step-note")


def test_a_note_is_written_in_the_form_and_removed_there(store_dir):
    """At the step that was clicked; the field is empty again afterwards."""
    write_run(store_dir)
    page = run_page()
    page.query_params["at"] = "12"
    page.run()
    assert page.text_input(key="note-step-12").value == "12"
    page.text_area(key="note-text").set_value("the judge was swapped")
    page.button(key="note-add").click().run()
    assert no_traceback(page)
    [note] = step_notes(open_store(str(store_dir)), "run-1")
    assert (note.step, note.text, note.by) == (12, "the judge was swapped", "ann")
    assert page.text_area(key="note-text").value == ""
    page.button(key=f"note-{note.note_id}").click().run()
    assert step_notes(open_store(str(store_dir)), "run-1") == []


@pytest.mark.parametrize("text", ["", "  ", "x" * (LONGEST + 1)])
def test_a_note_without_words_or_with_too_many_is_refused(store_dir, text):
    """In words."""
    write_run(store_dir)
    with pytest.raises(ConfigError, match="note"):
        add_step_note(open_store(str(store_dir)), "run-1", 3, text, by="ann")


def test_whoever_only_looks_writes_no_note(store_dir):
    """Whatever the browser sends."""
    write_run(store_dir)
    store = open_store(str(store_dir))
    with pytest.raises(NotPermittedError):
        incident_acts.note_at_step(store, "run-1", 3, by=Principal("eve", "viewer"), text="mine")
    assert store.audit("run-1") == []
