"""Asking for anything but a reset: from the menu to the row, and what a paused run shows."""

import time

import pytest
from app_world import alert, cells, danger_run, html, no_traceback, put_alerts, run_page, runs_page, tables, write_run
from rlwatch_app import commands
from rlwatch_app import format as fmt
from rlwatch_app.principal import NotPermittedError, Principal

from rlwatch.records import CommandStatus, Event, RunState
from rlwatch.store.url import open_store


@pytest.fixture
def store(store_dir):
    """The store behind the page."""
    store = open_store(str(store_dir))
    yield store
    store.close()


def chosen(page, kind):
    """Open the dialog of ``kind`` through the menu."""
    return page.menu_button(key="more").click(kind).run()


def sent(page, store):
    """Press Send; the one row there is."""
    page.button(key="send").click().run()
    assert no_traceback(page)
    (row,) = store.commands("run-1")
    return row.kind, row.args, row.force


@pytest.mark.parametrize(
    ("kind", "fill", "args"),
    [
        ("save-checkpoint", {}, {}),
        ("lower-lr", {}, {"scale": 0.3, "until": None, "freeze": "no"}),
        ("lower-lr", {"arg-scale": 0.1, "arg-until": 400}, {"scale": 0.1, "until": 400, "freeze": "no"}),
        ("set-kl-coef", {"arg-value": 0.02}, {"value": 0.02}),
        ("pause", {}, {"minutes": 60.0}),
        ("pause", {"arg-minutes": 5.0}, {"minutes": 5.0}),
    ],
)
def test_what_can_be_undone_is_two_clicks(store_dir, store, kind, fill, args):
    """Open, send: no name to type."""
    write_run(store_dir)
    page = chosen(run_page(), kind)
    assert no_traceback(page)
    for key, value in fill.items():
        page.number_input(key=key).set_value(value)
    page.run()
    assert sent(page, store) == (kind, args, False)
    assert cells(tables(page)["commands"]["rows"][0])[:2] == [fmt.words(kind), "queued"]


def test_a_stop_needs_the_name(store_dir, store):
    """It cannot be undone from here."""
    write_run(store_dir)
    page = chosen(run_page(), "stop")
    assert page.button(key="send").disabled
    page.radio(key="arg-save").set_value("no")
    page.text_input(key="typed").set_value("seed3").run()
    assert sent(page, store) == ("stop", {"save": "no"}, False)


def test_a_coefficient_that_was_not_given_is_asked_for_in_words(store_dir, store):
    """Nothing is guessed."""
    write_run(store_dir)
    page = chosen(run_page(), "set-kl-coef")
    page.button(key="send").click().run()
    assert "set-kl-coef needs value" in page.code[0].value
    assert store.commands("run-1") == []


def test_the_dialog_says_what_the_quantity_is_now(store_dir):
    """So that a fraction means something."""
    write_run(store_dir, metrics=lambda step: {"reward": 1.0, "learning_rate": 2e-6, "policy/kl_coef": 0.01})
    assert "current learning rate: 2e-06 (step 30)" in html(chosen(run_page(), "lower-lr"))
    assert "current KL coefficient: 0.01 (step 30)" in html(chosen(run_page(), "set-kl-coef"))


def test_a_collapse_is_warned_of_where_the_trainer_would_refuse(store_dir, store):
    """And force is offered there only."""
    danger_run(store_dir)
    page = chosen(run_page(), "save-checkpoint")
    assert "refused unless forced" in html(page)
    page.checkbox(key="force").check()
    assert sent(page, store) == ("save-checkpoint", {}, True)
    page = chosen(run_page(), "pause")
    assert "refused" not in html(page)
    assert not [box for box in page.checkbox if box.key == "force"]


def paused(store_dir, store, minutes=30.0):
    """A run that was paused at its last step, ten minutes ago by its clock."""
    write_run(store_dir, age_s=200.0)
    writer = store.open_run(store.run("run-1"))
    writer.heartbeat(time.time())
    asked = commands.send(
        store,
        "run-1",
        "pause",
        {"minutes": minutes},
        why="look",
        by=Principal("ann", "operator"),
        force=False,
        key="k",
    )
    store.claim("run-1", time.time())
    store.settle("run-1", asked.command_id, CommandStatus.DONE, time.time(), step=30, result="paused")
    return writer


def test_a_paused_run_says_so_and_offers_to_go_on(store_dir, store):
    """On its page and in the list; it is not stale, and nobody needs to look."""
    writer = paused(store_dir, store)
    page = run_page()
    assert no_traceback(page)
    assert "paused at step 30 by ann: look; resumes by itself in 30" in html(page)
    assert "no step for" not in html(page)
    listed = runs_page()
    assert cells(tables(listed)["runs"]["rows"][0])[0] == "paused"
    assert "No live run needs attention" in html(listed)
    page.button(key="resume-open").click().run()
    assert "the run is paused" in html(page)
    page.button(key="send").click().run()
    assert [row.kind for row in store.commands("run-1")] == ["pause", "resume"]
    writer.close()


def test_a_run_that_is_over_cannot_be_asked(store_dir):
    """The menu is grey."""
    write_run(store_dir, state=RunState.FINISHED)
    assert run_page().menu_button(key="more").disabled


def test_events_of_commands_are_sentences(store_dir):
    """What was done, by whom, why."""
    body = {
        "command": "lower-lr",
        "args": {"scale": 0.3, "until": None},
        "report": {"before": 1e-6, "after": 3e-7, "summary": "learning rate 1e-06 -> 3e-07"},
        "by": "ann@lab",
        "why": "spikes",
        "id": "c1",
    }
    write_run(store_dir, events=[Event("command", step=15, body=body)])
    (row,) = tables(run_page())["events"]["rows"]
    assert cells(row) == ["15", "lower learning rate", "learning rate 1e-06 -> 3e-07 · by ann@lab · spikes"]


def test_a_saturated_kl_makes_the_reset_stand_out_and_nothing_else(store_dir):
    """The menu stays quiet."""
    write_run(store_dir)
    put_alerts(store_dir, [alert(kind="kl_saturation")])
    assert no_traceback(chosen(run_page(), "lower-lr"))


def test_what_was_not_begun_is_taken_back_by_its_button(store_dir, store):
    """In the hands of a trainer: that is asked to let it go; queued: at once; what was answered has no button."""
    write_run(store_dir)
    for kind in ("pause", "save-checkpoint"):
        commands.send(store, "run-1", kind, {}, why="", by=Principal("ann", "operator"), force=False, key=kind)
    done, held = store.claim("run-1", time.time())
    store.settle("run-1", done.command_id, CommandStatus.DONE, time.time(), step=30, result="paused")
    queued = commands.send(
        store, "run-1", "resume", {}, why="", by=Principal("ann", "operator"), force=False, key="resume"
    )
    page = run_page()
    buttons = [button.key for button in page.button if str(button.key).startswith("cancel-")]
    assert buttons == [f"cancel-{held.command_id}", f"cancel-{queued.command_id}"]
    for key in buttons:
        page.button(key=key).click().run()
        assert no_traceback(page)

    assert [row.status for row in store.commands("run-1")] == [
        CommandStatus.DONE,
        CommandStatus.CANCELLING,
        CommandStatus.CANCELLED,
    ]
    assert [cells(row)[1] for row in tables(page)["commands"]["rows"]][:2] == ["cancelled", "cancelling"]
    assert not [button for button in page.button if str(button.key).startswith("cancel-")]


def test_a_dead_trainer_is_reported_before_anything_is_asked_of_it(store_dir, store):
    """On its page, where no command can be chosen, and in a dialog that was opened while it lived."""
    write_run(store_dir, age_s=400.0)
    writer = store.open_run(store.run("run-1"))
    writer.heartbeat(time.time())
    page = chosen(run_page(), "pause")
    writer.heartbeat(time.time() - 300)
    page.run()

    assert "its process no longer responds" in html(page)
    assert "the trainer is dead: the command expires unless it is restarted" in html(page)
    menu = run_page().menu_button(key="more")
    assert (menu.disabled, menu.help) == (True, "The trainer is dead: no command reaches it until it is restarted")
    writer.close()


def test_a_viewer_takes_nothing_back(store_dir, store, looks):
    """No button is offered, and the one place that cancels refuses."""
    write_run(store_dir)
    asked = commands.send(
        store, "run-1", "pause", {}, why="look", by=Principal("ann", "operator"), force=False, key="k"
    )
    looks("eve", "viewer")
    page = run_page()
    assert not [button for button in page.button if str(button.key).startswith("cancel-")]
    with pytest.raises(NotPermittedError, match="eve has read-only access"):
        commands.cancel_command(store, "run-1", asked.command_id, by=Principal("eve", "viewer"))
    cancelled = commands.cancel_command(store, "run-1", asked.command_id, by=Principal("bob", "operator"))
    assert (cancelled.status, cancelled.result) == (CommandStatus.CANCELLED, "cancelled by bob")
