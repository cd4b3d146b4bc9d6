"""The page of past forecasts, as Streamlit draws it."""

from app_world import boards, forecasts_page, html, no_traceback, tables, write_run

from rlwatch.forecast.forecast import Forecast, record_of
from rlwatch.records import ClosedStep, RunState
from rlwatch.store.url import open_store


def failing(step):
    """KL leaves for good at step 200."""
    return {"reward": 0.8, "entropy": 1.0, "kl": 9.0 if step >= 200 else 0.01, "grad_norm": 1.0}


def forecast_run(where, run_id="run-1", alarms=range(170, 190)):
    """A run that failed, with a forecast each step."""
    store = open_store(str(where))
    write_run(where, run_id, steps=400, metrics=failing)
    writer = store.open_run(store.run(run_id))
    given = [
        Forecast(
            s, p50=0.9 if s in alarms else 0.02, risk=1.5 if s in alarms else 0.1, alarm=s in alarms, limit="ref_kl"
        )
        for s in range(60, 401)
    ]
    writer.write([record_of(each, ClosedStep(each.step, {}, {}, seq=each.step)) for each in given])
    writer.finish(RunState.FINISHED, "", 1.0)
    writer.close()


def rows(page):
    return [[cell.get("text") for cell in row["cells"]] for row in tables(page)["forecasts"]["rows"]]


def test_nothing_forecast_is_said_in_words(store_dir):
    """And when the forecaster speaks."""
    write_run(store_dir)
    page = forecasts_page()
    assert no_traceback(page)
    assert "No forecasts yet" in html(page)


def test_each_alarm_stands_with_what_came_of_it_and_the_chances_with_how_they_held(store_dir):
    """One that came true with its lead, one that did not, and the curve."""
    forecast_run(store_dir)
    forecast_run(store_dir, "run-2", alarms=range(100, 105))
    page = forecasts_page()
    assert no_traceback(page)
    by_came = {row[0]: row for row in rows(page)}
    assert by_came["came true"][3].startswith("90")
    assert "step" in by_came["came true"][6]
    assert by_came["did not come true"][6] == ""
    assert "1 of 2 alarms came true, a median of" in html(page)
    assert boards(page)["reliability"]["sections"][0]["panels"][0]["lines"][0]["y"]


def test_a_forecast_is_judged(store_dir):
    """Who and why are kept, and shown instead of the question; without an answer nothing is kept."""
    forecast_run(store_dir)
    page = forecasts_page()
    assert rows(page)[0][-1] == "rate"
    page.session_state["judging"] = ("run-1", 170)
    page.run()
    page.button(key="judge").click().run()
    assert "Choose right or wrong" in page.error[0].value
    page.radio(key="judge-right").set_value("right")
    page.text_input(key="judge-why").input("it blew up")
    page.button(key="judge").click().run()
    assert no_traceback(page)
    [kept] = open_store(str(store_dir)).forecast_answers()
    assert (kept.run_id, kept.step, kept.right, kept.by, kept.why) == ("run-1", 170, True, "ann", "it blew up")
    assert rows(forecasts_page())[0][-1] == "right (ann): it blew up"


def test_a_viewer_is_not_asked_and_cannot_answer(store_dir, looks):
    """The role is checked where it is written."""
    forecast_run(store_dir)
    looks("eve", "viewer")
    page = forecasts_page()
    assert rows(page)[0][-1] == "no feedback"
    page.session_state["judging"] = ("run-1", 170)
    page.run()
    page.radio(key="judge-right").set_value("wrong")
    page.button(key="judge").click().run()
    assert "eve has read-only access" in page.code[0].value
    assert open_store(str(store_dir)).forecast_answers() == []
