"""The contract of :mod:`rlwatch.store` as tests. A new store runs them by defining one fixture.

>>> class TestMyStore(StoreContract):
...     @pytest.fixture
...     def store(self):
...         return MyStore("somewhere new")

``reopen`` opens the same store as another process would; override it if the URL is not enough. If you override a test,
state the reason in a comment. This module tests commands, alerts, the outbox and silences. ``store_run_contract``,
``store_data_contract``, ``store_series_contract``, ``store_curation_contract``, ``store_people_contract`` and
``store_fields_contract`` test the rest.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import (
    Acknowledgement,
    Alert,
    AlertState,
    Command,
    CommandStatus,
    Ledger,
    OutboxMessage,
    OutboxStatus,
    Severity,
    Silence,
)
from rlwatch.testing.store_curation_contract import CurationContract, PeopleContract
from rlwatch.testing.store_data_contract import ReadingContract, ValuesContract
from rlwatch.testing.store_fields_contract import FieldsContract
from rlwatch.testing.store_run_contract import (
    BranchContract,
    ForecastContract,
    RunContract,
    StoreHooks,
    alert,
    command,
    fill,
    message,
)
from rlwatch.testing.store_series_contract import SeriesContract
from rlwatch.testing.store_trl_contract import TRLLogContract

__all__ = ["StoreContract", "pytest"]


class CommandContract(StoreHooks):
    """Tests that commands to a run are queued, claimed and settled, or expire."""

    def test_a_command_comes_back_as_it_was_submitted(self, store: Store) -> None:
        """Check that every field of a command comes back, from any process that opens the store."""
        fill(store)
        asked = Command(
            "c1",
            "run",
            "set-lr <i>",
            args={"lr": 1e-7, "to": math.inf},
            force=True,
            requested_by="ann é",
            why="drift " * 50,
            idempotency_key="click-1",
            created_at=10.0,
            expires_at=20.0,
        )

        assert store.submit(asked) == asked
        assert self.reopen(store).commands("run") == [asked]

    def test_commands_need_their_run(self, store: Store) -> None:
        """Check that a command for an unknown (mistyped) run id is an error."""
        fill(store)
        with pytest.raises(RunNotFoundError, match="absent"):
            store.submit(command(run_id="absent"))
        with pytest.raises(RunNotFoundError, match="absent"):
            store.commands("absent")
        with pytest.raises(RunNotFoundError, match="absent"):
            store.claim("absent", 0.0)

    def test_a_run_without_commands_has_an_empty_list(self, store: Store) -> None:
        """Check that polling a run without commands is not an error."""
        fill(store)

        assert (store.commands("run"), store.claim("run", 1.0)) == ([], [])

    def test_the_same_click_twice_is_one_command(self, store: Store) -> None:
        """Check that an idempotency key or id that occurs twice within a run gives one command; an empty key does not
        count.
        """
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        first = store.submit(command("c1", key="click"))

        assert store.submit(replace(command("c2", key="click"), why="again")) == first
        assert store.submit(replace(command("c1"), why="again")) == first
        assert store.submit(command("c3", "other", key="click")).command_id == "c3"
        store.submit(command("c4"))
        store.submit(command("c5"))
        assert [each.command_id for each in store.commands("run")] == ["c1", "c4", "c5"]

    def test_claiming_takes_what_is_queued_once(self, store: Store) -> None:
        """Check that queued commands are claimed once, oldest first, with the time of the claim."""
        fill(store)
        for command_id in ("c1", "c2"):
            store.submit(command(command_id))

        claimed = self.reopen(store).claim("run", 5.0)

        assert [(each.command_id, each.status, each.claimed_at) for each in claimed] == [
            ("c1", CommandStatus.CLAIMED, 5.0),
            ("c2", CommandStatus.CLAIMED, 5.0),
        ]
        assert store.claim("run", 6.0) == []
        assert store.commands("run") == claimed

    def test_overdue_commands_expire_instead_of_being_obeyed(self, store: Store) -> None:
        """Check that overdue commands expire, so that a restarted trainer does not execute old ones; 0 means never."""
        fill(store)
        for command_id, expires_at in (("old", 9.0), ("now", 10.0), ("later", 10.5), ("never", 0.0)):
            store.submit(command(command_id, expires_at=expires_at))

        assert [each.command_id for each in store.claim("run", 10.0)] == ["later", "never"]
        expired = store.commands("run", CommandStatus.EXPIRED)
        assert [(each.command_id, each.finished_at) for each in expired] == [("old", 10.0), ("now", 10.0)]

    def test_settling_answers_with_step_and_result(self, store: Store) -> None:
        """Check that a claimed command is settled as done or as rejected, with step and result."""
        fill(store)
        for command_id in ("c1", "c2"):
            store.submit(command(command_id))
        store.claim("run", 1.0)

        done = store.settle("run", "c1", CommandStatus.DONE, 2.0, step=7, result="reset <b>")
        rejected = store.settle("run", "c2", CommandStatus.REJECTED, 3.0, step=None, result="no reference")

        assert (done.status, done.finished_at, done.finished_step, done.result) == (
            CommandStatus.DONE,
            2.0,
            7,
            "reset <b>",
        )
        assert (rejected.status, rejected.finished_step) == (CommandStatus.REJECTED, None)
        assert store.commands("run") == [done, rejected]
        assert store.commands("run", CommandStatus.DONE) == [done]

    def test_the_first_answer_stays(self, store: Store) -> None:
        """Check that the first answer to a command stays, whatever is reported later."""
        fill(store)
        store.submit(command())
        store.claim("run", 1.0)
        first = store.settle("run", "c1", CommandStatus.DONE, 2.0, step=7, result="yes")

        assert store.settle("run", "c1", CommandStatus.REJECTED, 3.0, step=8, result="no") == first
        assert store.commands("run") == [first]

    def test_an_expired_command_stays_expired(self, store: Store) -> None:
        """Check that an expired command cannot be reported as done later."""
        fill(store)
        store.submit(command(expires_at=1.0))
        store.claim("run", 2.0)

        late = store.settle("run", "c1", CommandStatus.DONE, 3.0, step=1, result="done")
        assert late.status is CommandStatus.EXPIRED

    def test_settling_what_cannot_be_settled_is_refused(self, store: Store) -> None:
        """Check that an unknown or unclaimed command, or a status that is not final, is refused."""
        fill(store)
        with pytest.raises(StoreError, match="c1"):
            store.settle("run", "c1", CommandStatus.DONE, 1.0, step=None, result="")
        store.submit(command())
        with pytest.raises(StoreError, match="queued"):
            store.settle("run", "c1", CommandStatus.DONE, 1.0, step=None, result="")
        with pytest.raises(StoreError, match="claimed"):
            store.settle("run", "c1", CommandStatus.CLAIMED, 1.0, step=None, result="")
        assert [each.status for each in store.commands("run")] == [CommandStatus.QUEUED]

    def test_claiming_from_many_threads_hands_each_out_once(self, store: Store) -> None:
        """Check that each command is claimed once if many threads claim at the same time."""
        fill(store)
        names = {store.submit(command(f"c{number}")).command_id for number in range(20)}

        with ThreadPoolExecutor(4) as pool:
            claimed = [each for part in pool.map(lambda _: store.claim("run", 1.0), range(8)) for each in part]

        assert sorted(each.command_id for each in claimed) == sorted(names)

    def test_commands_do_not_need_the_writer(self, store: Store) -> None:
        """Check that other processes can use commands while the run's writer is open and after it has closed."""
        writer = store.open_run(command_run := fill(store))
        store.submit(command())
        assert len(store.claim("run", 1.0)) == 1
        writer.close()
        assert command_run.run_id == "run"
        assert len(self.reopen(store).commands("run")) == 1

    def test_every_answer_is_kept(self, store: Store) -> None:
        """Check that a trainer can report a command as failed, expired or cancelled."""
        fill(store)
        answers = (CommandStatus.FAILED, CommandStatus.EXPIRED, CommandStatus.CANCELLED)
        for answer in answers:
            store.submit(command(answer.value))
        store.claim("run", 1.0)
        for answer in answers:
            store.settle("run", answer.value, answer, 2.0, step=None, result="why")

        assert [each.status for each in self.reopen(store).commands("run")] == list(answers)

    def test_a_queued_command_is_cancelled_at_once(self, store: Store) -> None:
        """Check that a queued command that is cancelled is never handed out."""
        fill(store)
        store.submit(command())
        cancelled = store.cancel("run", "c1", 3.0, result="by ann")

        assert (cancelled.status, cancelled.finished_at, cancelled.result) == (CommandStatus.CANCELLED, 3.0, "by ann")
        assert self.reopen(store).claim("run", 4.0) == []
        assert store.commands("run") == [cancelled]

    def test_a_claimed_command_is_released_by_its_claimant(self, store: Store) -> None:
        """Check that only the process that claimed a command ends its cancellation; its later answer stays."""
        fill(store)
        for command_id in ("c1", "c2"):
            store.submit(command(command_id))
        store.claim("run", 1.0)
        asked = [store.cancel("run", command_id, 2.0, result="by ann") for command_id in ("c1", "c2")]
        let_go = store.settle("run", "c1", CommandStatus.CANCELLED, 3.0, step=None, result="by ann")
        begun = store.settle("run", "c2", CommandStatus.DONE, 3.0, step=7, result="reset")

        assert [(each.status, each.finished_at, each.result) for each in asked] == [
            (CommandStatus.CANCELLING, None, "by ann")
        ] * 2
        assert (let_go.status, begun.status) == (CommandStatus.CANCELLED, CommandStatus.DONE)
        assert store.cancel("run", "c2", 4.0, result="too late") == begun

    def test_what_was_answered_is_not_cancelled(self, store: Store) -> None:
        """Check that a settled (for example expired) command is not cancelled, and that an unknown one is an error."""
        fill(store)
        store.submit(command(expires_at=1.0))
        store.claim("run", 2.0)

        assert store.cancel("run", "c1", 3.0, result="by ann").status is CommandStatus.EXPIRED
        with pytest.raises(StoreError, match="c9"):
            store.cancel("run", "c9", 3.0, result="by ann")
        with pytest.raises(RunNotFoundError, match="absent"):
            store.cancel("absent", "c1", 3.0, result="by ann")

    def test_a_command_is_claimed_or_cancelled_never_both(self, store: Store) -> None:
        """Check that a command is either claimed or cancelled, whichever comes first, from many threads."""
        fill(store)
        names = [store.submit(command(f"c{number}")).command_id for number in range(20)]

        def cancel(command_id: str) -> str:
            return command_id if store.cancel("run", command_id, 1.0, result="").finished_at is not None else ""

        with ThreadPoolExecutor(6) as pool:
            cancels = pool.map(cancel, names)
            claims = pool.map(lambda _: store.claim("run", 1.0), range(10))
            cancelled = {name for name in cancels if name}
            claimed = {each.command_id for part in claims for each in part}

        assert cancelled | claimed == set(names)
        assert not cancelled & claimed
        after = {each.command_id: each.status for each in store.commands("run")}
        assert all(after[name] is CommandStatus.CANCELLED for name in cancelled)
        assert all(after[name] in (CommandStatus.CLAIMED, CommandStatus.CANCELLING) for name in claimed)


# Contract: alerts by id, and an outbox whose messages are leased to one deliverer at a time.


class AlertContract(StoreHooks):
    """Tests that a store keeps alerts, and hands messages out for delivery exactly once."""

    def test_an_alert_comes_back_whole(self, store: Store) -> None:
        """Check that every field of an alert comes back, also after each change."""
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
        """Check that alerts of one run or of all come newest first, and that an update does not make one newer."""
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        for alert_id in ("a1", "a2", "a3"):
            store.put_alerts([alert(alert_id)], [])
        store.put_alerts([alert("a1", state=AlertState.RESOLVED)], [])
        store.put_alerts([alert("b1", "other")], [])

        assert [each.alert_id for each in store.alerts("run")] == ["a3", "a2", "a1"]
        assert {each.alert_id for each in store.alerts()} == {"a1", "a2", "a3", "b1"}

    def test_alerts_of_several_runs_in_one_call(self, store: Store) -> None:
        """Check that alerts of several runs in one call are stored with their runs."""
        for run_id in ("run", "other"):
            fill(store, run_id=run_id)
        store.put_alerts([alert("a1"), alert("b1", "other")], [message("m1"), message("n1", "other")])

        assert [each.alert_id for each in store.alerts("other")] == ["b1"]
        assert [each.message_id for each in store.outbox("other")] == ["n1"]
        assert [each.message_id for each in store.outbox("run")] == ["m1"]

    def test_alerts_need_their_run(self, store: Store) -> None:
        """Check that reading and writing alerts of an unknown run are errors."""
        with pytest.raises(RunNotFoundError, match="run"):
            store.put_alerts([alert()], [])
        with pytest.raises(RunNotFoundError, match="run"):
            store.alerts("run")
        with pytest.raises(RunNotFoundError, match="run"):
            store.outbox("run")

    def test_a_message_is_put_once(self, store: Store) -> None:
        """Check that a second message with a known id does not replace the first, because two processes may write the
        same message.
        """
        fill(store)
        first = replace(message(), payload={"n": 1}, created_at=3.0)
        store.put_alerts([alert()], [first])
        store.put_alerts([alert()], [replace(first, payload={"n": 2}), message("m2", due=5.0)])

        assert [(each.message_id, each.payload) for each in store.outbox("run")] == [
            ("m2", {"text": "entropy"}),
            ("m1", {"n": 1}),
        ]

    def test_a_leased_message_is_not_leased_again_until_the_lease_ends(self, store: Store) -> None:
        """Check that a leased message is leased again only after its lease ended, as when its process died."""
        fill(store)
        store.put_alerts([], [message()])

        [leased] = store.lease_messages(10.0, lease_s=5.0)

        assert leased == replace(message(), lease_until=15.0)
        assert self.reopen(store).lease_messages(14.9, lease_s=5.0) == []
        assert len(store.lease_messages(15.0, lease_s=5.0)) == 1

    def test_only_due_messages_of_the_channels_asked_for_are_leased(self, store: Store) -> None:
        """Check that due messages of the given channels are leased, oldest first, at most ``limit``, over all runs."""
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
        """Check that a settled message has its outcome and no lease; a failed attempt is due again at its given
        time.
        """
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
        """Check that a sent or abandoned message is never leased again, whatever is reported later."""
        fill(store)
        store.put_alerts([], [message()])
        [leased] = store.lease_messages(1.0, lease_s=1.0)
        store.settle_message(replace(leased, status=over, attempts=1, sent_at=2.0))
        store.settle_message(replace(leased, status=OutboxStatus.PENDING, attempts=5))

        [kept] = store.outbox("run")
        assert (kept.status, kept.attempts, kept.sent_at) == (over, 1, 2.0)
        assert store.lease_messages(100.0, lease_s=1.0) == []

    def test_what_was_given_up_can_be_made_due_again(self, store: Store) -> None:
        """Check that an unsent message, also an abandoned one, can be made due again under its id; a sent one
        cannot.
        """
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

    def test_a_clock_that_goes_back_delays_no_message(self, store: Store) -> None:
        """Check that a message to be tried again is due at once after the clock went back, also if it is put back."""
        fill(store)
        store.put_alerts([], [message()])
        [leased] = store.lease_messages(10_000.0, lease_s=60.0)
        store.settle_message(replace(leased, attempts=1, next_attempt_at=10_008.0, last_error="HTTP 500"))

        [again] = store.lease_messages(100.0, lease_s=60.0)
        assert again.next_attempt_at <= 100.0
        store.settle_message(again)

        assert [each.message_id for each in store.lease_messages(100.5, lease_s=60.0)] == [again.message_id]

    def test_a_deliverer_that_lost_its_lease_can_only_report_success(self, store: Store) -> None:
        """Check that a process whose lease went to another can report only success, so that its failure does no
        harm.
        """
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
        """Check that each message is leased once if many threads lease, as trainer, watcher and app may all deliver."""
        fill(store)
        store.put_alerts([], [message(f"m{number}") for number in range(20)])

        with ThreadPoolExecutor(4) as pool:
            parts = pool.map(lambda _: store.lease_messages(1.0, lease_s=9.0, limit=3), range(12))
            leased = [each.message_id for part in parts for each in part]

        assert sorted(leased) == sorted(f"m{number}" for number in range(20))


# Contract: what composers, acknowledgements and silences need of a store.

QUIET = Silence("s1", "ann", "node 7 is in repair", 10.0, 20.0, run="run", kind="kl_drift", labels={"team": "rl"})


class DeskContract(StoreHooks):
    """Tests that a store composes messages about alerts, and keeps acknowledgements and silences."""

    def test_the_composer_sees_all_that_is_stored(self, store: Store) -> None:
        """Check that the function that composes messages gets the alerts just stored, earlier messages, and
        acknowledgements.
        """
        fill(store)
        store.put_alerts([alert("a1")], [message("m1")])
        taken = store.acknowledge(Acknowledgement("a1", "run", "ann", "mine", 3.0))
        seen: list[Ledger] = []

        def compose(ledger: Ledger) -> list[OutboxMessage]:
            seen.append(ledger)
            return [message("m2")]

        written = store.publish("run", [alert("a2")], compose)

        assert seen == [Ledger((alert("a1"), alert("a2")), (message("m1"),), (taken,))]
        assert written == [message("m2")]
        assert store.ledger("run") == Ledger((alert("a1"), alert("a2")), (message("m1"), message("m2")), (taken,))

    def test_what_was_written_already_is_not_written_again(self, store: Store) -> None:
        """Check that ``publish`` neither stores nor returns a composed message whose id is already stored, or occurs
        twice in one call.
        """
        fill(store)
        store.publish("run", [], lambda _: [message("m1")])

        written = store.publish(
            "run", [], lambda _: [replace(message("m1"), channel="x"), message("m2"), message("m2")]
        )

        assert [each.message_id for each in written] == ["m2"]
        assert [each.channel for each in store.outbox("run")] == ["hook", "hook"]

    def test_a_composer_that_fails_leaves_nothing_behind(self, store: Store) -> None:
        """Check that an exception in the function that composes messages leaves the call's alerts unstored, so that the
        call may be repeated.
        """
        fill(store)

        def broken(_: Ledger) -> list[OutboxMessage]:
            raise RuntimeError("no template")

        with pytest.raises(RuntimeError, match="no template"):
            store.publish("run", [alert("a1")], broken)

        assert store.ledger("run").alerts == ()

    def test_many_composers_never_write_one_thing_twice(self, store: Store) -> None:
        """Check that if many threads each write a message only where none is stored, exactly one message is stored."""
        fill(store)

        def first_only(ledger: Ledger) -> list[OutboxMessage]:
            return [] if ledger.messages else [message(f"m{id(ledger)}")]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.publish("run", [], first_only), range(12)))

        assert len(store.outbox("run")) == 1

    def test_an_acknowledgement_stays_unless_a_worse_one_comes(self, store: Store) -> None:
        """Check that the first acknowledgement of an alert counts until one of a higher severity replaces it."""
        fill(store)
        store.put_alerts([alert("a1")], [])
        first = Acknowledgement("a1", "run", "ann", "é", 1.0, Severity.WARNING)
        again, worse = replace(first, by="bob"), replace(first, by="cy", severity=Severity.CRITICAL)

        assert [store.acknowledge(each) for each in (first, again, worse, first)] == [first, first, worse, worse]
        assert self.reopen(store).acknowledgements("run") == store.acknowledgements() == [worse]

    def test_acknowledgements_and_ledgers_need_their_run(self, store: Store) -> None:
        """Check that reading and writing acknowledgements, and composing messages, need an existing run."""
        with pytest.raises(RunNotFoundError, match="run"):
            store.acknowledge(Acknowledgement("a1", "run", "ann"))
        with pytest.raises(RunNotFoundError, match="run"):
            store.acknowledgements("run")
        with pytest.raises(RunNotFoundError, match="run"):
            store.publish("run", [], lambda _: [])
        with pytest.raises(RunNotFoundError, match="run"):
            store.ledger("run")

    def test_a_run_without_alerts_has_an_empty_ledger(self, store: Store) -> None:
        """Check that a run without alerts has no alerts, messages and acknowledgements, and that reading creates
        nothing.
        """
        fill(store)

        assert (store.ledger("run"), store.acknowledgements("run"), store.silences()) == (Ledger(), [], [])

    def test_a_silence_comes_back_whole_to_every_process(self, store: Store) -> None:
        """Check that silences come back whole, oldest first, in every process, and that ending one replaces it."""
        other = Silence("s0", "bob", "", 11.0, 12.0)
        for silence in (QUIET, other):
            store.put_silence(silence)
        assert self.reopen(store).silences() == [QUIET, other]

        store.put_silence(replace(QUIET, until=15.0))
        assert store.silences() == [replace(QUIET, until=15.0), other]

    def test_one_caller_at_a_time_holds_the_store(self, store: Store) -> None:
        """Check that one caller at a time holds the lock of the store, across threads and processes."""
        fill(store)
        store.put_alerts([alert("a1", state=AlertState.FIRING)], [])

        def publish_once(number: int) -> None:
            with store.exclusive():
                if not store.ledger("run").messages:
                    store.put_alerts([], [message(f"m{number}")])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(publish_once, range(8)))

        assert len(store.outbox("run")) == 1


class StoreContract(
    RunContract,
    ReadingContract,
    ForecastContract,
    ValuesContract,
    BranchContract,
    SeriesContract,
    TRLLogContract,
    CommandContract,
    AlertContract,
    DeskContract,
    CurationContract,
    PeopleContract,
    FieldsContract,
):
    """All tests that a store must pass."""
