"""Contract: alerts by id, and an outbox whose messages are leased to one deliverer at a time."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlwatch.errors import RunNotFoundError
from rlwatch.ports import Store
from rlwatch.records import Alert, AlertState, OutboxStatus, Severity
from rlwatch.testing.store_hooks import StoreHooks, alert, fill, message


class AlertContract(StoreHooks):
    """Alerts and outbox."""

    def test_an_alert_comes_back_whole(self, store: Store) -> None:
        """Every field, and again after each change."""
        fill(store)
        pending = Alert(
            "a1",
            "run",
            "no <script>",
            "kl_drift",
            Severity.WARNING,
            AlertState.PENDING,
            5,
            6,
            "é" * 300,
            "why",
            "kl",
            {"kl": math.inf},
        )
        store.put_alerts([pending], [])
        assert self.reopen(store).alerts("run") == [pending]

        over = replace(
            pending,
            severity=Severity.CRITICAL,
            state=AlertState.RESOLVED,
            step=9,
            message="over",
            reason="quiet",
            evidence={},
            fired_at=10.0,
            resolved_step=9,
            resolved_at=11.0,
        )
        store.put_alerts([over], [])
        assert store.alerts("run") == [over]

    def test_alerts_come_newest_first(self, store: Store) -> None:
        """Of one run or of all; an update does not make one newer."""
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        for alert_id in ("a1", "a2", "a3"):
            store.put_alerts([alert(alert_id)], [])
        store.put_alerts([alert("a1", state=AlertState.RESOLVED)], [])
        store.put_alerts([alert("b1", "other")], [])

        assert [each.alert_id for each in store.alerts("run")] == ["a3", "a2", "a1"]
        assert {each.alert_id for each in store.alerts()} == {"a1", "a2", "a3", "b1"}

    def test_alerts_of_several_runs_in_one_call(self, store: Store) -> None:
        """Each lands with its run."""
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        store.put_alerts([alert("a1"), alert("b1", "other")], [message("m1"), message("n1", "other")])

        assert [each.alert_id for each in store.alerts("other")] == ["b1"]
        assert [each.message_id for each in store.outbox("other")] == ["n1"]
        assert [each.message_id for each in store.outbox("run")] == ["m1"]

    def test_alerts_need_their_run(self, store: Store) -> None:
        """Asking and putting."""
        with pytest.raises(RunNotFoundError, match="run"):
            store.put_alerts([alert()], [])
        with pytest.raises(RunNotFoundError, match="run"):
            store.alerts("run")
        with pytest.raises(RunNotFoundError, match="run"):
            store.outbox("run")

    def test_a_message_is_put_once(self, store: Store) -> None:
        """Two evaluators of one run make the same ids; the first message stays as it is."""
        fill(store)
        first = replace(message(), payload={"n": 1}, created_at=3.0)
        store.put_alerts([alert()], [first])
        store.put_alerts([alert()], [replace(first, payload={"n": 2}), message("m2", due=5.0)])

        assert [(each.message_id, each.payload) for each in store.outbox("run")] == [
            ("m2", {"text": "entropy"}),
            ("m1", {"n": 1}),
        ]

    def test_a_leased_message_is_nobody_elses_until_the_lease_ends(self, store: Store) -> None:
        """A deliverer that died gives its messages back that way."""
        fill(store)
        store.put_alerts([], [message()])

        [leased] = store.lease_messages(10.0, lease_s=5.0)

        assert leased == replace(message(), lease_until=15.0)
        assert self.reopen(store).lease_messages(14.9, lease_s=5.0) == []
        assert len(store.lease_messages(15.0, lease_s=5.0)) == 1

    def test_only_due_messages_of_the_channels_asked_for_are_leased(self, store: Store) -> None:
        """Oldest first, at most ``limit``, over all runs."""
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        store.put_alerts(
            [],
            [
                replace(message("m1", due=1.0), created_at=3.0),
                replace(message("m2", due=9.0), created_at=1.0),
                replace(message("m3", channel="chat"), created_at=2.0),
                replace(message("n1", "other"), created_at=1.0),
            ],
        )

        assert [each.message_id for each in store.lease_messages(5.0, lease_s=1.0, channels=["chat"])] == ["m3"]
        assert store.lease_messages(5.0, lease_s=1.0, channels=[]) == []
        assert [each.message_id for each in store.lease_messages(5.0, lease_s=1.0)] == ["n1", "m1"]
        assert len(store.lease_messages(9.0, lease_s=1.0, limit=1)) == 1
        assert store.lease_messages(9.0, lease_s=1.0, limit=0) == []

    def test_settling_writes_the_outcome_and_drops_the_lease(self, store: Store) -> None:
        """A failed try comes due again when it says."""
        fill(store)
        store.put_alerts([], [message()])
        [leased] = store.lease_messages(1.0, lease_s=60.0)

        store.settle_message(replace(leased, attempts=1, next_attempt_at=4.0, last_error="HTTP 500"))

        assert store.outbox("run") == [
            replace(message(), attempts=1, next_attempt_at=4.0, last_error="HTTP 500", lease_until=0.0)
        ]
        assert store.lease_messages(3.9, lease_s=1.0) == []
        [again] = store.lease_messages(4.0, lease_s=1.0)
        assert again.attempts == 1

    @pytest.mark.parametrize("over", [OutboxStatus.SENT, OutboxStatus.DEAD])
    def test_what_is_over_stays_over(self, store: Store, over: OutboxStatus) -> None:
        """Never leased again, whatever is said of it later."""
        fill(store)
        store.put_alerts([], [message()])
        [leased] = store.lease_messages(1.0, lease_s=1.0)
        store.settle_message(replace(leased, status=over, attempts=1, sent_at=2.0))
        store.settle_message(replace(leased, status=OutboxStatus.PENDING, attempts=5))

        [kept] = store.outbox("run")
        assert (kept.status, kept.attempts, kept.sent_at) == (over, 1, 2.0)
        assert store.lease_messages(100.0, lease_s=1.0) == []

    def test_what_was_given_up_can_be_made_due_again(self, store: Store) -> None:
        """Under the same id, as tried before; also one that waits for its next try. What is sent stays sent."""
        fill(store)
        store.put_alerts([], [message("dead"), message("waits", due=1e9), message("sent"), message("held")])
        for leased in store.lease_messages(1.0, lease_s=1.0):
            over = {"dead": OutboxStatus.DEAD, "sent": OutboxStatus.SENT}.get(leased.message_id)
            if over is not None:
                store.settle_message(replace(leased, status=over, last_error="why"))
        [held] = store.lease_messages(3.0, lease_s=100.0)
        for each in store.outbox("run"):
            store.retry_message(each)

        assert held.message_id == "held"
        assert {m.message_id for m in store.lease_messages(4.0, lease_s=1.0)} == {"dead", "waits"}
        kept = {m.message_id: (m.status, m.attempts, m.last_error) for m in store.outbox("run")}
        assert kept["dead"] == (OutboxStatus.PENDING, 1, "why")
        assert kept["sent"][0] is OutboxStatus.SENT

    def test_whoever_lost_the_lease_can_only_report_success(self, store: Store) -> None:
        """A slow deliverer's failure must not take the message out of the hands of the next one."""
        fill(store)
        store.put_alerts([], [message()])
        [slow] = store.lease_messages(1.0, lease_s=1.0)
        [quick] = store.lease_messages(2.0, lease_s=10.0)

        store.settle_message(replace(slow, attempts=1, last_error="timeout"))
        assert store.outbox("run") == [quick]
        assert store.lease_messages(3.0, lease_s=1.0) == []

        store.settle_message(replace(slow, status=OutboxStatus.SENT, attempts=1, sent_at=3.0))
        assert store.outbox("run")[0].status is OutboxStatus.SENT

    def test_leasing_from_many_threads_hands_each_out_once(self, store: Store) -> None:
        """Trainer, watch and app may all deliver."""
        fill(store)
        store.put_alerts([], [message(f"m{number}") for number in range(20)])

        with ThreadPoolExecutor(4) as pool:
            parts = pool.map(lambda _: store.lease_messages(1.0, lease_s=9.0, limit=3), range(12))
            leased = [each.message_id for part in parts for each in part]

        assert sorted(leased) == sorted(f"m{number}" for number in range(20))
