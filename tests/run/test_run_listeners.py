"""Who listens to a run hears what it found, on the judge's thread, and never holds up the loop."""

import threading

import pytest

import rlwatch
from rlwatch.records import AlertState


def collapse(run, steps=80):
    """An entropy that falls to nothing."""
    for step in range(steps):
        run.log({"policy/entropy": 1.0 if step < 40 else 1e-4, "policy/vocab_size": 64}, step=step)


def test_a_listener_hears_every_finding_and_alert_that_is_stored(tmp_path):
    """The same as the store holds, in order, told by the judge's thread."""
    store = str(tmp_path / "runs")
    heard, threads = [], set()
    with rlwatch.init(store=store) as run:
        run.listen(lambda outcome: (heard.append(outcome), threads.add(threading.current_thread().name)))
        collapse(run)
    findings = [finding for outcome in heard for finding in outcome.findings]
    fired = {t.alert.alert_id for o in heard for t in o.transitions if t.alert.state is AlertState.FIRING}
    stored = rlwatch.open_store(store)

    assert findings == stored.findings(run.info.run_id)
    assert findings
    assert {
        alert.alert_id for alert in stored.alerts(run.info.run_id) if alert.state is not AlertState.PENDING
    } == fired
    assert threads == {"rlwatch-judge"}


@pytest.mark.parametrize("listeners", [0, 2])
def test_a_run_may_have_any_number_of_listeners(tmp_path, listeners):
    """Each hears the same."""
    heard = [[] for _ in range(listeners)]
    with rlwatch.init(store=str(tmp_path / "runs")) as run:
        for ear in heard:
            run.listen(ear.append)
        collapse(run)

    assert all(ear == heard[0] and ear for ear in heard)
