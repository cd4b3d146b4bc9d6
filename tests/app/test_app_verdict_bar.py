"""The bar on top of a run's page: state and headline, since when, and buttons that say why they cannot be pressed."""

from app_world import alert, danger_run, finding, html, put_alerts, run_page, tables, write_run
from rlwatch_app.health import StatusWord, Word
from rlwatch_app.run_history import once_each
from rlwatch_app.run_page import since_fact

from rlwatch.records import RunInfo, RunState, Severity
from rlwatch.store.url import open_store
from rlwatch.view import view_of_run
from rlwatch.wording import step


def test_the_bar_has_the_engines_headline_and_since_when(store_dir):
    """Word by word, once on the page; the step that the headline names is not repeated."""
    danger_run(store_dir)
    store = open_store(str(store_dir))
    page = run_page()
    headline = view_of_run(store, store.run("run-1")).headline
    assert html(page).count(headline) == 1
    assert "step 12" in headline
    assert "18 steps ago" in html(page)
    assert "since step 12, 18" not in html(page)


def test_a_longer_number_does_not_name_a_step():
    """Step 12 is not in a headline about step 12 480, nor in one about step 120; without it the bar names it."""
    run = RunInfo("run", last_step=30)
    collapsed = StatusWord(Word.COLLAPSED, since=12)
    shown = [str(since_fact(run, collapsed, f"Killed at step {step(at)}: collapsed")) for at in (12, 120, 1212, 12_480)]

    assert ["since step 12" in text for text in shown] == [False, True, True, True]


def test_a_button_that_cannot_be_pressed_says_why(store_dir, looks):
    """Of a run that ended, and to whoever may only look."""
    write_run(store_dir, "over", state=RunState.FINISHED)
    page = run_page("over")
    for key in ("reset-open", "rollback-open"):
        assert (page.button(key=key).disabled, page.button(key=key).help) == (
            True, "The run has finished: no trainer will run the command")  # fmt: skip
    assert page.button(key="acknowledge").help == "No alert of this run is firing"
    looks("bob", "viewer")
    danger_run(store_dir, "live")
    assert all("Read-only" in run_page("live").button(key=key).help for key in ("rollback-open", "acknowledge"))


def test_what_fires_is_acknowledged_from_the_bar(store_dir):
    """In the name of who pressed it."""
    danger_run(store_dir)
    put_alerts(store_dir, [alert(kind="kl_runaway")])
    run_page().button(key="acknowledge").click().run()
    kept = open_store(str(store_dir)).acknowledgements()
    assert {(one.by, one.why) for one in kept} == {("ann", "on the run's page")}
    assert len(kept) == 2


def test_a_roll_back_is_one_click_away(store_dir):
    """Its dialog asks for the name first."""
    danger_run(store_dir)
    page = run_page().button(key="rollback-open").click().run()
    assert page.text_input(key="typed").label.startswith("Type seed3")


def test_findings_that_repeat_themselves_are_one_row(store_dir):
    """How often, and since when; two are two, and of another severity apart."""
    again = [
        finding(kind="kl_drift", severity=Severity.WARNING, step=s, onset_step=s - 2, seq=s) for s in range(10, 24)
    ]
    told = once_each([*again, finding(), finding(step=25, seq=25)])
    assert [words for _, words in told] == ["", "", "14 times since step 8"]
    write_run(store_dir, findings=again)
    rows = tables(run_page())["findings"]["rows"]
    assert [row["cells"][1]["sub"] for row in rows] == ["14 times since step 8"]
