"""The page of alerts, as Streamlit draws it."""

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

from rlwatch.records import AlertState, OutboxStatus, Severity


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
