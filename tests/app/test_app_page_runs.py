"""The list of runs, as Streamlit draws it."""

from app_world import NAN, WEIRD, cells, danger_run, healthy, html, no_traceback, runs_page, tables, write_run

from rlwatch.records import RunState
from rlwatch.store.sqlite.filestore import FileStore


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
    assert "No run needs you" in html(page)
    assert rows(page)[0][:4] == ["healthy", "seed3", "30", "0.5"]
    assert not page.multiselect


def test_a_run_in_danger_is_on_top_with_its_reason(store_dir):
    """The question the page exists for."""
    write_run(store_dir, "calm", name="calm")
    danger_run(store_dir, "bad", name="bad")
    page = runs_page()
    assert "1 run needs you" in html(page)
    assert [row[:2] for row in rows(page)] == [["danger", "bad"], ["healthy", "calm"]]
    assert rows(page)[0][7] == "entropy collapse since step 12 (18 steps)"


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
    assert rows(page)[0][:4] == ["healthy", "seed3", "-", "-"]


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
    assert "No run matches" in page.caption[0].value


def test_finished_and_crashed_runs_say_so(store_dir):
    """With the reason the trainer gave."""
    write_run(store_dir, "f", name="f", state=RunState.FINISHED)
    write_run(store_dir, "c", name="c", state=RunState.CRASHED, reason="RuntimeError: boom")
    page = runs_page()
    assert [row[:2] for row in rows(page)] == [["crashed", "c"], ["finished", "f"]]
    assert rows(page)[0][7] == "RuntimeError: boom"


def test_what_has_nothing_new_is_not_read_again(store_dir, monkeypatch):
    """A hundred runs are drawn anew every few seconds: their series come out of the cache."""
    for i in range(100):
        write_run(store_dir, f"run-{i:03}", name=f"seed{i}", steps=20)
    asked = []

    def counted(name, read):
        return lambda *args, **kwargs: asked.append(name) or read(*args, **kwargs)

    for name in ("runs", "series", "last_values", "metric_names", "forecasts", "findings", "events"):
        monkeypatch.setattr(FileStore, name, counted(name, getattr(FileStore, name)))
    page = runs_page()
    assert no_traceback(page)
    assert len(rows(page)) == 100
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
