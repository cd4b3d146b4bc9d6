"""Asking for a reset of the reference, from the button to the row, and the row's life after."""

import time

import pytest
from app_world import alert, cells, danger_run, html, no_traceback, put_alerts, run_page, tables, write_run
from rlwatch_app import commands
from rlwatch_app.principal import Principal

from rlwatch.errors import ControlUnavailableError
from rlwatch.records import CommandStatus
from rlwatch.store.url import open_store


@pytest.fixture
def store(store_dir):
    """The store behind the page."""
    store = open_store(str(store_dir))
    yield store
    store.close()


def opened(page):
    return page.button(key="reset-open").click().run()


def test_the_dialog_opens_and_send_waits_for_the_name(store_dir, store):
    """Nothing is sent by opening, nor by a wrong name."""
    write_run(store_dir)
    page = opened(run_page())
    assert no_traceback(page)
    assert page.button(key="send").disabled
    page.text_input(key="typed").set_value("seed4").run()
    assert page.button(key="send").disabled
    assert store.commands("run-1") == []


def test_type_the_name_and_send_queues_one_row(store_dir, store):
    """The whole way, and the dialog is gone."""
    write_run(store_dir)
    page = opened(run_page())
    page.radio(key="arg-optimizer").set_value("keep")
    page.text_input(key="why").set_value("KL saturated")
    page.text_input(key="typed").set_value("seed3").run()
    page.button(key="send").click().run()
    assert no_traceback(page)
    (row,) = store.commands("run-1")
    assert (row.kind, row.args, row.why, row.requested_by, row.force) == (
        "reset-reference", {"optimizer": "keep"}, "KL saturated", "ann", False
    )  # fmt: skip
    assert not [b for b in page.button if b.key == "send"]
    assert cells(tables(page)["commands"]["rows"][0])[:2] == ["reset reference", "queued"]


def test_the_rows_life_is_shown_and_stays(store_dir, store):
    """Queued, claimed, done at a step with its result; then a rejected one above it."""
    write_run(store_dir)
    first = commands.send(
        store, "run-1", "reset-reference", {}, why="w", by=Principal("ann", "operator"), force=False, key="k1"
    )
    page = run_page()
    assert cells(tables(page)["commands"]["rows"][0])[1] == "queued"
    store.claim("run-1", time.time())
    page.run()
    assert cells(tables(page)["commands"]["rows"][0])[1] == "claimed"
    store.settle("run-1", first.command_id, CommandStatus.DONE, time.time(), step=31, result="KL 0.31 to 0")
    page.run()
    assert cells(tables(page)["commands"]["rows"][0])[1:5] == ["done at step 31", "KL 0.31 to 0", "w", "ann"]
    second = commands.send(
        store, "run-1", "reset-reference", {}, why="", by=Principal("bob", "operator"), force=False, key="k2"
    )
    store.claim("run-1", time.time())
    store.settle("run-1", second.command_id, CommandStatus.REJECTED, time.time(), step=32, result="refused: collapse")
    page.run()
    rows = [cells(row)[1] for row in tables(page)["commands"]["rows"]]
    assert rows == ["rejected at step 32", "done at step 31"]


def test_a_collapse_warns_and_force_is_carried(store_dir, store):
    """The trainer would refuse; a person may overrule."""
    danger_run(store_dir)
    page = opened(run_page())
    assert "refused unless forced" in html(page)
    page.checkbox(key="force").check()
    page.text_input(key="typed").set_value("seed3").run()
    page.button(key="send").click().run()
    assert store.commands("run-1")[0].force


def test_a_saturated_kl_does_not_warn(store_dir):
    """It is the reason to reset."""
    write_run(store_dir)
    put_alerts(store_dir, [alert(kind="kl_saturation")])
    page = opened(run_page())
    assert "no collapse is firing" in html(page)


def test_cancel_sends_nothing(store_dir, store):
    """And closes."""
    write_run(store_dir)
    page = opened(run_page())
    page.button(key="cancel").click().run()
    assert not [b for b in page.button if b.key == "send"]
    assert store.commands("run-1") == []


def test_a_store_that_cannot_carry_commands_is_a_message(store_dir, store, monkeypatch):
    """The dialog stays, with the reason."""

    def refuse(*args, **kwargs):
        raise ControlUnavailableError("commands do not work on a network file system")

    write_run(store_dir)
    page = opened(run_page())
    page.text_input(key="typed").set_value("seed3").run()
    monkeypatch.setattr(commands, "send", refuse)
    page.button(key="send").click().run()
    assert no_traceback(page)
    assert page.error[0].value == "The command was not sent."
    assert "network file system" in page.code[0].value
    assert store.commands("run-1") == []


def test_each_opening_is_a_command_of_its_own(store_dir, store):
    """The idempotency key is new with every opening, and only then."""
    write_run(store_dir)
    page = run_page()
    for _ in range(2):
        opened(page)
        page.text_input(key="typed").set_value("seed3").run()
        page.button(key="send").click().run()
    assert len(store.commands("run-1")) == 2


def test_the_confirmation_is_not_remembered(store_dir):
    """A second opening asks again."""
    write_run(store_dir)
    page = opened(run_page())
    page.text_input(key="typed").set_value("seed3").run()
    page.button(key="send").click().run()
    opened(page)
    assert page.text_input(key="typed").value == ""
    assert page.button(key="send").disabled


def test_a_viewer_may_look_and_not_send(store_dir, store, looks):
    """The buttons cannot be pressed; and a browser that presses them all the same, the dialog open, is refused."""
    write_run(store_dir)
    looks("eve", "viewer")
    page = run_page()
    assert page.button(key="reset-open").disabled
    page.session_state[commands.COMMAND_PENDING] = ("run-1", "save-checkpoint", "key")
    page.run().button(key="send").click().run()
    assert no_traceback(page)
    assert "eve has read-only access" in page.code[0].value
    assert store.commands("run-1") == []
