"""The page of alerts, as Streamlit draws it."""

import re
import time

from app_world import (
    WEIRD,
    alert,
    alerts_page,
    cells,
    html,
    message,
    no_traceback,
    put_alerts,
    tables,
    write_run,
)
from rlwatch_app.alerts_page import subject

from rlwatch.records import Acknowledgement, AlertState, OutboxStatus, Severity, Silence
from rlwatch.store.url import open_store


def rows(page):
    return [cells(row) for row in tables(page)["alerts"]["rows"]]


def test_no_alert_is_said_in_words(store_dir):
    """And what decides on them."""
    page = alerts_page()
    assert no_traceback(page)
    assert "No alert is firing" in html(page)
    assert "Nothing has raised an alarm" in page.caption[0].value


def test_an_alert_shows_what_when_and_what_became_of_it(store_dir):
    """Severity, state, run, what, since, rule, delivery, age."""
    write_run(store_dir)
    one = alert()
    put_alerts(store_dir, [one], [message(one.alert_id, OutboxStatus.DEAD, attempts=8, last_error="HTTP 410 Gone")])
    page = alerts_page()
    assert no_traceback(page)
    assert rows(page) == [
        [
            "critical",
            "firing",
            "seed3",
            "entropy collapse: entropy fell from 1 to 0.1 nats/token",
            "12",
            "collapse",
            "dead after 8 tries: HTTP 410 Gone",
            "1\u202fmin ago",
            "acknowledge",
        ]
    ]


def test_the_list_can_be_narrowed_to_what_fires(store_dir):
    """By a click, or by an address that somebody sent."""
    write_run(store_dir)
    put_alerts(
        store_dir,
        [alert(), alert(kind="kl_drift", severity=Severity.WARNING, state=AlertState.RESOLVED, resolved_step=30)],
    )
    page = alerts_page()
    assert len(rows(page)) == 2
    page.segmented_control(key="which").set_value("firing").run()
    assert [row[1] for row in rows(page)] == ["firing"]
    assert [row[1] for row in rows(alerts_page(which="firing"))] == ["firing"]


def test_hostile_text_in_alerts_is_only_data(store_dir):
    """Messages quote metric names, which come from users."""
    write_run(store_dir, name=WEIRD)
    put_alerts(store_dir, [alert(message=WEIRD, rule="<b>")])
    page = alerts_page()
    assert no_traceback(page)
    assert "<script" not in html(page)
    assert WEIRD.split(" ", maxsplit=1)[0] in rows(page)[0][3]


def taken(store_dir, **more):
    store = open_store(str(store_dir))
    return store.acknowledge(Acknowledgement(alert().alert_id, "run-1", "ann", "rolled back", 1.0, **more))


def test_a_firing_alert_can_be_acknowledged_once(store_dir):
    """Who and why are kept; the row then says so and offers it no more."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = alerts_page()
    assert rows(page)[0][-1] == "acknowledge"
    page.session_state["take-pending"] = alert().alert_id
    page.run()
    page.text_input(key="take-why").input("rolled back")
    page.button(key="take").click().run()
    assert no_traceback(page)
    [kept] = open_store(str(store_dir)).acknowledgements()
    assert (kept.alert_id, kept.by, kept.why, kept.severity) == (
        alert().alert_id,
        "ann",
        "rolled back",
        Severity.CRITICAL,
    )
    assert (rows(page)[0][1], rows(page)[0][-1]) == ("acknowledged", "")
    assert "1 alert firing, 1 acknowledged" in html(page)


def test_the_dialog_names_the_run_and_the_alert(store_dir):
    """Several runs may have an alert of one kind; names are only text."""
    write_run(store_dir)
    write_run(store_dir, "run-2", name=WEIRD)
    put_alerts(store_dir, [alert(), alert("run-2")])

    def asked(run_id):
        page = alerts_page()
        page.session_state["take-pending"] = alert(run_id).alert_id
        page.run()
        assert no_traceback(page)
        return "".join(element.value for element in page.get("html") if "rl-family" in element.value)

    assert re.sub(r"<[^>]+>", "|", asked("run-1")).replace("|", "") == (
        "math / seed3■ criticalentropy collapsesince step 12rule collapse"
    )
    assert "&lt;script&gt;" in asked("run-2")
    assert ">gone<" in subject(alert("gone"), None)


def test_an_acknowledgement_can_be_cancelled(store_dir):
    """Nothing is kept."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = alerts_page()
    page.session_state["take-pending"] = alert().alert_id
    page.run()
    page.button(key="take-cancel").click().run()
    assert no_traceback(page)
    assert open_store(str(store_dir)).acknowledgements() == []
    assert not page.text_input


def test_an_alert_that_was_over_by_then_says_why_it_was_not_acknowledged(store_dir):
    """In words, in the dialog."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = alerts_page()
    page.session_state["take-pending"] = alert().alert_id
    page.run()
    put_alerts(store_dir, [alert(state=AlertState.RESOLVED, resolved_step=30)])
    page.button(key="take").click().run()
    assert no_traceback(page)
    assert "was not acknowledged" in page.error[0].value
    assert "only what fires" in page.code[0].value


def test_worse_than_acknowledged_can_be_acknowledged_again(store_dir):
    """It was a warning when ann took it on."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    taken(store_dir, severity=Severity.WARNING)
    page = alerts_page()
    assert (rows(page)[0][1], rows(page)[0][-1]) == ("firing", "acknowledge")


def test_what_keeps_alerts_quiet_is_shown(store_dir):
    """A silence with what it is about, by whom and why; a cause that fires."""
    write_run(store_dir)
    cause = alert(kind="nonfinite")
    put_alerts(store_dir, [cause, alert(), alert(kind="kl_drift")])
    now = time.time()
    store = open_store(str(store_dir))
    store.put_silence(Silence("s", "bob", WEIRD, now - 5, now + 7200, kind="kl_drift"))
    store.put_silence(Silence("t", "bob", "", now - 5, now - 1))
    page = alerts_page()
    assert no_traceback(page)
    assert sorted(row[1] for row in rows(page)) == ["firing", "inhibited", "silenced"]
    assert page.expander[0].label == "1 silence: nobody is told of these"
    assert "kind kl_drift for" in page.expander[0].text[0].value


def test_a_configuration_that_cannot_be_read_does_not_hide_the_alerts(store_dir, monkeypatch):
    """The usual rules say what is quiet; of a file in the store, and of one that is named."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    (store_dir / "rlwatch.toml").write_text("rulez = 1")
    for named in ("", str(store_dir / "rlwatch.toml")):
        monkeypatch.setenv("RLWATCH_CONFIG", named)
        page = alerts_page()
        assert no_traceback(page)
        assert rows(page)[0][1] == "firing"


def test_a_viewer_is_offered_no_acknowledgement_and_gets_none(store_dir, looks):
    """Not in the row; and a browser that presses the button of the dialog all the same is refused."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    looks("eve", "viewer")
    page = alerts_page()
    assert rows(page)[0][-1] == ""
    page.session_state["take-pending"] = alert().alert_id
    page.run().button(key="take").click().run()
    assert no_traceback(page)
    assert "eve may look and not command" in page.code[0].value
    assert open_store(str(store_dir)).acknowledgements() == []
