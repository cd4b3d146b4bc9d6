"""The list of runs, as Streamlit draws it."""

import time

import pytest
from app_world import NAN, WEIRD, cells, danger_run, healthy, html, no_traceback, runs_page, tables, write_run
from rlwatch_app import runs_page as page_of_runs
from rlwatch_app.principal import NotPermittedError, Principal

from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite.filestore import FileStore
from rlwatch.store.url import open_store


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A store of 103 runs, which is only read."""
    where = tmp_path_factory.mktemp("many")
    for i in range(103):
        write_run(where, f"run-{i:03}", name=f"seed{i}", steps=20)
    return where


def rows(page):
    return [cells(row) for row in tables(page)["runs"]["rows"]]


def test_an_empty_store_says_how_to_begin(store_dir):
    """Three lines to copy, the store they write to, and a log to look at instead."""
    page = runs_page()
    assert no_traceback(page)
    shown = [code.value for code in page.code]
    assert any("watch(trainer" in code and len(code.splitlines()) == 3 for code in shown)
    assert any(str(store_dir) in code for code in shown)
    assert any("rlwatch scan" in code for code in shown)
    assert tables(page) == {}


def test_a_store_that_does_not_exist_yet_is_empty(tmp_path, monkeypatch):
    """The app may be started before the first trainer."""
    monkeypatch.setenv("RLWATCH_STORE", str(tmp_path / "not" / "yet"))
    page = runs_page()
    assert no_traceback(page)
    assert "No runs yet" in html(page)


def test_one_run_is_one_row_without_filters(store_dir):
    """Nothing to choose from, nothing to choose with."""
    write_run(store_dir)
    page = runs_page()
    assert no_traceback(page)
    assert "No live run needs attention" in html(page)
    assert rows(page)[0][:4] == ["healthy", "seed3", "30", "0.5"]
    assert not page.multiselect


def test_a_run_in_danger_is_on_top_with_its_reason(store_dir):
    """The question the page exists for."""
    write_run(store_dir, "calm", name="calm")
    danger_run(store_dir, "bad", name="bad")
    page = runs_page()
    assert "1 run needs attention" in html(page)
    assert [row[:2] for row in rows(page)] == [["collapsed@12", "bad"], ["healthy", "calm"]]
    assert rows(page)[0][7].startswith("entropy fell; still running")


def test_a_metric_that_is_nan_from_step_one(store_dir):
    """It has a word and marks, not a hole."""
    write_run(store_dir, metrics=lambda step: {**healthy(step), "reward": NAN, "entropy": NAN})
    page = runs_page()
    assert no_traceback(page)
    row = tables(page)["runs"]["rows"][0]
    assert row["cells"][3]["text"] == "NaN"
    assert row["cells"][4]["points"] == []
    assert row["cells"][4]["bad"][:1] == [0.0]


def test_a_run_without_any_step(store_dir):
    """It has just begun."""
    write_run(store_dir, steps=0)
    page = runs_page()
    assert no_traceback(page)
    assert rows(page)[0][:4] == ["not judged", "seed3", "-", "-"]


def test_a_weird_name_is_only_ever_data(store_dir):
    """It reaches the table as text and no HTML at all."""
    write_run(store_dir, name=WEIRD, project="<b>p</b>")
    page = runs_page()
    assert no_traceback(page)
    assert "<script" not in html(page)
    link = tables(page)["runs"]["rows"][0]["cells"][1]
    assert (link["kind"], link["title"], link["sub"]) == ("link", WEIRD, "<b>p</b>")


def test_an_unreadable_run_is_named_and_hides_no_other(store_dir):
    """A damaged file is one line, not the end of the page."""
    write_run(store_dir, "good", name="good")
    write_run(store_dir, "broken", name="broken")
    (store_dir / "broken" / "run.db").write_bytes(b"this is not a database" * 100)
    for rest in (store_dir / "broken").glob("run.db-*"):
        rest.unlink()
    page = runs_page()
    assert no_traceback(page)
    assert [row[1] for row in rows(page)] == ["good"]
    unreadable = [cells(row) for row in tables(page)["unreadable"]["rows"]]
    assert unreadable[0][0] == "broken"
    assert unreadable[0][1]


def test_a_store_that_is_a_file_is_a_message(tmp_path, monkeypatch):
    """What is wrong, in words."""
    target = tmp_path / "file"
    target.write_text("x")
    monkeypatch.setenv("RLWATCH_STORE", str(target))
    page = runs_page()
    assert no_traceback(page)
    assert "cannot be read" in page.error[0].value
    assert str(target) in page.code[0].value


def test_filters_narrow_the_list_and_live_in_the_address(store_dir):
    """A colleague sees what I see."""
    write_run(store_dir, "a", name="a", project="math")
    write_run(store_dir, "b", name="b", project="code")
    page = runs_page()
    page.multiselect(key="project").set_value(["code"]).run()
    assert [row[1] for row in rows(page)] == ["b"]
    assert [row[1] for row in rows(runs_page(project="code"))] == ["b"]
    page.text_input(key="search").set_value("nothing like it").run()
    assert any("No run matches" in caption.value for caption in page.caption)


def test_finished_and_crashed_runs_say_so(store_dir):
    """With the reason the trainer gave."""
    write_run(store_dir, "f", name="f", state=RunState.FINISHED)
    write_run(store_dir, "c", name="c", state=RunState.CRASHED, reason="RuntimeError: boom")
    page = runs_page()
    assert [row[:2] for row in rows(page)] == [["killed@30", "c"], ["healthy", "f"]]
    assert rows(page)[0][7].startswith("RuntimeError: boom")


def test_what_has_nothing_new_is_not_read_again(many, monkeypatch):
    """A hundred runs are drawn anew every few seconds: their series come out of the cache."""
    monkeypatch.setenv("RLWATCH_STORE", str(many))
    asked = []

    def counted(name, read):
        return lambda *args, **kwargs: asked.append(name) or read(*args, **kwargs)

    for name in ("runs", "series", "last_values", "metric_names", "forecasts", "findings", "events"):
        monkeypatch.setattr(FileStore, name, counted(name, getattr(FileStore, name)))
    page = runs_page()
    assert no_traceback(page)
    assert len(rows(page)) == 60
    assert asked.count("series") + asked.count("last_values") >= 100

    asked.clear()
    page.run()
    assert set(asked) <= {"runs"}


def test_new_steps_appear_on_the_next_look(store_dir):
    """What is cached is cached by how far the run has come."""
    write_run(store_dir, steps=30)
    page = runs_page()
    assert rows(page)[0][2] == "30"
    write_run(store_dir, steps=31, metrics=lambda step: {**healthy(step), "reward": 9.0})
    page.run()
    assert rows(page)[0][2:4] == ["31", "9"]


def test_without_a_door_there_is_nothing_to_see(store_dir, looks):
    """``streamlit run`` of the same file lets nobody in unseen."""
    write_run(store_dir)
    looks("", "")
    page = runs_page()
    assert no_traceback(page)
    assert "start it with rlwatch ui" in page.error[0].value
    assert tables(page) == {}


# Search, columns, curves, order, groups: all of it in the address.


def sweep(store_dir):
    """Four runs of two settings and two seeds."""
    for place, (lr, seed) in enumerate([(3e-5, 1), (3e-5, 2), (1e-6, 1), (1e-6, 2)]):
        write_run(store_dir, f"r{place}", name=f"lr{lr:g}-s{seed}", config={"optim": {"lr": lr}, "seed": seed},
                  metrics=lambda step, place=place: {**healthy(step), "reward": place + 0.01 * step, "mine": step / 9})  # fmt: skip


def names(page):
    return [row[1] for row in rows(page)]


def test_runs_are_found_by_their_settings(store_dir):
    """However the number is written, and with words beside it."""
    sweep(store_dir)
    assert sorted(names(runs_page(search="lr=0.00003"))) == ["lr3e-05-s1", "lr3e-05-s2"]
    assert names(runs_page(search="lr<1e-5 -seed=1")) == ["lr1e-06-s2"]
    assert rows_of(runs_page(search="-s1 lr1e-06-s1")) == []


def test_columns_curves_and_order_are_the_readers(store_dir):
    """A colleague with the address sees the same; what has no value comes last."""
    sweep(store_dir)
    write_run(store_dir, "odd", name="odd", metrics=lambda step: {"reward": NAN})
    page = runs_page(sort="reward, highest", columns=["step", "reward", "notes"], curves=["mine"])
    assert names(page) == ["lr1e-06-s2", "lr1e-06-s1", "lr3e-05-s2", "lr3e-05-s1", "odd"]
    heads = tables(page)["runs"]["columns"]
    assert [head["label"] for head in heads] == ["state", "run", "step", "reward", "notes", "mine"]
    assert [head["sorted"] for head in heads if head["sorted"]] == ["descending"]
    curve = tables(page)["runs"]["rows"][0]["cells"][5]
    assert (curve["kind"], curve["text"], len(curve["points"])) == ("spark", "3.33 ↑", 30)


def test_groups_are_folded_into_mean_and_band_and_unfold(store_dir):
    """Seeds of a setting; a group names how many, and its curve has a band."""
    sweep(store_dir)
    page = runs_page(group="optim.lr", sort="reward, lowest")
    found = tables(page)["runs"]["rows"]
    assert [(row["cells"][1]["text"], row["cells"][1]["sub"]) for row in found] == [
        ("optim.lr = 3e-05", "2 runs"), ("optim.lr = 1e-06", "2 runs")
    ]  # fmt: skip
    assert found[0]["cells"][3]["text"] == "0.8 ± 0.707"
    middle = found[0]["cells"][4]["points"][20]
    assert middle[2] < middle[1] < middle[3]

    unfolded = tables(runs_page(group="optim.lr", sort="reward, lowest", open=["optim.lr = 1e-06"]))["runs"]["rows"]
    assert [(row["unfolded"], row["member"]) for row in unfolded] == [
        (False, False), (True, False), (None, True), (None, True)
    ]  # fmt: skip


def test_a_thousand_runs_are_shown_bit_by_bit(many, monkeypatch):
    """The first sixty, and the address of the rest: what the browser asks for when it comes in sight."""
    monkeypatch.setenv("RLWATCH_STORE", str(many))
    page = runs_page(sort="run, lowest", picked=[])
    data = tables(page)["runs"]
    assert (len(data["rows"]), data["total"]) == (60, 103)
    path, query = data["more"].split("?", 1)
    assert path == "/api/list"
    assert "sort=run%2C+lowest" in query


# What people say about runs.


def ticked(store_dir, *run_ids, **params):
    return runs_page(picked=list(run_ids), **params)


def test_a_run_is_renamed_tagged_and_noted_and_all_of_it_is_undone(store_dir):
    """What its trainer wrote stays; the change carries the name of who made it."""
    write_run(store_dir, "a", name="seed3")
    page = ticked(store_dir, "a")
    page.button(key="edit").click().run()
    page.text_input(key="edit-name-a").set_value("best one")
    page.multiselect(key="edit-tags-a").set_value(["paper"])
    page.text_area(key="edit-notes-a").set_value("see the plan")
    page.button(key="edit-save").click().run()
    assert no_traceback(page)
    link = tables(page)["runs"]["rows"][0]["cells"][1]
    assert (link["text"], link["tags"], link["notes"]) == ("best one", ["paper"], "see the plan")
    (edit,) = open_store(str(store_dir)).edits("a")
    assert (edit.by, edit.name, edit.tagged) == ("ann", "best one", ("paper",))

    page.button(key="undo").click().run()
    link = tables(page)["runs"]["rows"][0]["cells"][1]
    assert (link["text"], link["tags"], link["notes"]) == ("seed3", [], "")


def test_deleting_hides_and_undo_brings_back(store_dir):
    """At once, and later from the list of what was deleted."""
    for run_id in ("a", "b"):
        write_run(store_dir, run_id, name=run_id, state=RunState.FINISHED)
    page = ticked(store_dir, "a")
    page.button(key="delete").click().run()
    assert names(page) == ["b"]
    page.button(key="undo").click().run()
    assert sorted(names(page)) == ["a", "b"]

    page = ticked(store_dir, "a", "b")
    page.button(key="delete").click().run()
    assert rows_of(page) == []
    assert page.button(key="undo")
    page = ticked(store_dir, "b", show="deleted")
    assert sorted(names(page)) == ["a", "b"]
    page.button(key="restore").click().run()
    assert names(runs_page()) == ["b"]


def rows_of(page):
    return tables(page).get("runs", {"rows": []})["rows"]


def test_archived_runs_are_out_of_the_way(store_dir):
    """Until one asks for them."""
    for run_id in ("a", "b"):
        write_run(store_dir, run_id, name=run_id)
    page = ticked(store_dir, "a")
    page.button(key="archive").click().run()
    assert names(page) == ["b"]
    assert sorted(names(runs_page(show="archived, too"))) == ["a", "b"]


def test_a_live_run_is_not_deleted_and_the_page_says_why(store_dir):
    """Nobody trains in secret."""
    write_run(store_dir, "a", name="a")
    open_store(str(store_dir)).open_run(RunInfo("live", name="live")).heartbeat(time.time())
    page = ticked(store_dir, "live")
    page.button(key="delete").click().run()
    assert "is live" in page.warning[0].value
    assert sorted(names(page)) == ["a", "live"]


def test_a_viewer_sees_what_people_said_and_changes_nothing(store_dir, looks):
    """Neither by a button nor past it."""
    write_run(store_dir, "a", name="a")
    write_run(store_dir, "b", name="b")
    looks("eve", "viewer")
    page = ticked(store_dir, "a", "b")
    assert {button.key for button in page.button} == {"compare", "compare-clear"}
    with pytest.raises(NotPermittedError, match="eve"):
        page_of_runs.change(open_store(str(store_dir)), ["a"], by=Principal("eve", "viewer"), name="mine")
