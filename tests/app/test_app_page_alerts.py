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

from rlwatch.records import Acknowledgement, AlertState, OutboxStatus, Severity, Silence
from rlwatch.store.url import open_store


def rows(page):
    return [cells(row) for row in tables(page)["alerts"]["rows"]]


def test_no_alert_is_said_in_words(store_dir):
    """And what decides on them."""
    page = alerts_page()
    assert no_traceback(page)
    assert "No firing incidents" in html(page)
    assert "No alerts yet" in page.caption[0].value


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
            "",
            "",
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
        [alert(), alert(kind="kl_drift", state=AlertState.RESOLVED, onset_step=200, resolved_step=230)],
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
    page.session_state["incident-open"] = alert().alert_id
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
    assert "1 incident firing, 1 acknowledged" in html(page)


def test_the_dialog_names_the_run_and_the_alert(store_dir):
    """Several runs may have an alert of one kind; names are only text."""
    write_run(store_dir)
    write_run(store_dir, "run-2", name=WEIRD)
    put_alerts(store_dir, [alert(), alert("run-2")])

    def asked(run_id):
        page = alerts_page()
        page.session_state["incident-open"] = alert(run_id).alert_id
        page.run()
        assert no_traceback(page)
        return "".join(element.value for element in page.get("html") if "rl-family" in element.value)

    assert re.sub(r"<[^>]+>", "", asked("run-1")) == ("math / seed3■ criticalfiringrule collapse")
    assert "&lt;script&gt;" in asked("run-2")


def opened(alert_id, **params):
    """The page with an incident open."""
    page = alerts_page(incident=alert_id, **params)
    assert no_traceback(page)
    return page


def test_one_row_an_incident_and_all_of_it_behind_a_click(store_dir):
    """Symptoms, who was told and what came of it, what people did: by the address of any of its alerts."""
    write_run(store_dir)
    lead, symptom = alert(), alert(kind="kl_drift", severity=Severity.WARNING, onset_step=15)
    sent = message(
        lead.alert_id, OutboxStatus.DEAD, attempts=8, last_error="HTTP 410 Gone", payload={"event": "firing"}
    )
    put_alerts(store_dir, [lead, symptom], [sent])
    taken(store_dir)
    [row] = rows(alerts_page())
    assert (row[1], row[3], row[6]) == (
        "acknowledged",
        "entropy collapse: entropy fell from 1 to 0.1 nats/token",
        "ann",
    )
    assert "drift" in row[5]
    shown = re.sub(r"<[^>]+>", "", html(opened(symptom.alert_id)))
    assert "slack firing: dead after 8 tries: HTTP 410 Gone" in shown
    assert "acknowledged by ann: rolled back" in shown
    assert shown.count("since step") >= 3


def test_an_incident_is_snoozed_silenced_and_noted(store_dir):
    """Each with who; a silence says what it is about and can be ended again."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    store = open_store(str(store_dir))

    def act(name, button, **fields):
        page = opened(alert().alert_id)
        page.segmented_control(key="act").set_value(name).run()
        for key, value in fields.items():
            widgets = (*page.text_input, *page.text_area)
            next(widget for widget in widgets if widget.key == key.replace("_", "-")).set_value(value)
        page.button(key=button).click().run()
        assert no_traceback(page)
        return page

    act("Note", "note", note_text="the judge was down")
    act("Snooze", "snooze", snooze_why="lunch")
    assert rows(alerts_page())[0][1] == "snoozed"
    act("Silence", "silence", silence_why="repair")
    snoozed, silenced = store.silences()
    assert (snoozed.by, snoozed.alerts, silenced.kind, silenced.run) == (
        "ann",
        (alert().alert_id,),
        "entropy_collapse",
        "run-1",
    )
    assert [(entry.by, entry.act) for entry in store.audit()] == [
        ("ann", "note"),
        ("ann", "snooze"),
        ("ann", "silence"),
    ]
    page = alerts_page()
    assert page.expander[0].label == "2 silences, matching alerts not sent"
    for silence in (snoozed, silenced):
        page.button(key=f"unsilence-{silence.silence_id}").click().run()
    assert rows(alerts_page())[0][1] == "firing"


def test_a_silence_without_a_reason_is_refused_in_words(store_dir):
    """Others will wonder."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = opened(alert().alert_id)
    page.segmented_control(key="act").set_value("Silence").run()
    page.button(key="silence").click().run()
    assert "Nothing was silenced" in page.error[0].value
    assert "needs a name and a reason" in page.code[0].value
    assert open_store(str(store_dir)).silences() == []


def test_runs_that_only_fell_silent_are_no_incidents(store_dir):
    """129 of them are one row, behind a choice of their own."""
    write_run(store_dir)
    silent = [
        alert(kind="run_silent", alert_id=f"s{at}", onset_step=at, state=AlertState.RESOLVED, resolved_step=at + 1)
        for at in range(0, 12_900, 100)
    ]
    put_alerts(store_dir, [*silent, alert(onset_step=40_000)])
    assert len(rows(alerts_page())) == 1
    assert len(rows(alerts_page(which="silent or crashed"))) == 1
    assert "1 incident · 1 run silent or crashed" in html(alerts_page())


def test_an_acknowledgement_can_be_cancelled(store_dir):
    """Nothing is kept."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = alerts_page()
    page.session_state["incident-open"] = alert().alert_id
    page.run()
    page.button(key="incident-close").click().run()
    assert no_traceback(page)
    assert open_store(str(store_dir)).acknowledgements() == []
    assert not page.text_input


def test_an_alert_that_was_over_by_then_is_not_acknowledged(store_dir):
    """The dialog says that it fires no more."""
    write_run(store_dir)
    put_alerts(store_dir, [alert()])
    page = opened(alert().alert_id)
    put_alerts(store_dir, [alert(state=AlertState.RESOLVED, resolved_step=30)])
    page.button(key="take").click().run()
    assert no_traceback(page)
    assert "No longer firing" in "".join(caption.value for caption in page.caption)
    assert open_store(str(store_dir)).acknowledgements() == []


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
    put_alerts(store_dir, [cause, alert(onset_step=100), alert(kind="kl_drift", onset_step=200)])
    now = time.time()
    store = open_store(str(store_dir))
    store.put_silence(Silence("s", "bob", WEIRD, now - 5, now + 7200, kind="kl_drift"))
    store.put_silence(Silence("t", "bob", "", now - 5, now - 1))
    page = alerts_page()
    assert no_traceback(page)
    assert sorted(row[1] for row in rows(page)) == ["firing", "inhibited", "silenced"]
    assert page.expander[0].label == "1 silence, matching alerts not sent"
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
    page.session_state["incident-open"] = alert().alert_id
    page.run().button(key="take").click().run()
    assert no_traceback(page)
    assert "eve has read-only access" in page.code[0].value
    assert open_store(str(store_dir)).acknowledgements() == []
