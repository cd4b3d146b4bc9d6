"""Contract: what composers, acknowledgements and silences need of a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlwatch.errors import RunNotFoundError
from rlwatch.ports import Store
from rlwatch.records import Acknowledgement, AlertState, Ledger, OutboxMessage, Severity, Silence
from rlwatch.testing.store_hooks import StoreHooks, alert, fill, message

QUIET = Silence("s1", "ann", "node 7 is in repair", 10.0, 20.0, run="run", kind="kl_drift", labels={"team": "rl"})


class DeskContract(StoreHooks):
    """Telling, acknowledging, silencing."""

    def test_whoever_composes_sees_all_that_is_stored(self, store: Store) -> None:
        """The alert just put, what was written before, and who took it on."""
        fill(store)
        store.put_alerts([alert("a1")], [message("m1")])
        taken = store.acknowledge(Acknowledgement("a1", "run", "ann", "mine", 3.0))
        seen: list[Ledger] = []

        def compose(ledger: Ledger) -> list[OutboxMessage]:
            seen.append(ledger)
            return [message("m2")]

        written = store.tell("run", [alert("a2")], compose)

        assert seen == [Ledger((alert("a1"), alert("a2")), (message("m1"),), (taken,))]
        assert written == [message("m2")]
        assert store.ledger("run") == Ledger((alert("a1"), alert("a2")), (message("m1"), message("m2")), (taken,))

    def test_what_was_written_already_is_not_written_again(self, store: Store) -> None:
        """Nor returned; two of one id in one answer are one."""
        fill(store)
        store.tell("run", [], lambda _: [message("m1")])

        written = store.tell("run", [], lambda _: [replace(message("m1"), channel="x"), message("m2"), message("m2")])

        assert [each.message_id for each in written] == ["m2"]
        assert [each.channel for each in store.outbox("run")] == ["hook", "hook"]

    def test_a_composer_that_fails_leaves_nothing_behind(self, store: Store) -> None:
        """The alerts of the call neither: it may be made again."""
        fill(store)

        def broken(_: Ledger) -> list[OutboxMessage]:
            raise RuntimeError("no template")

        with pytest.raises(RuntimeError, match="no template"):
            store.tell("run", [alert("a1")], broken)

        assert store.ledger("run").alerts == ()

    def test_many_composers_never_write_one_thing_twice(self, store: Store) -> None:
        """Each writes a message only if none is there: one is."""
        fill(store)

        def first_only(ledger: Ledger) -> list[OutboxMessage]:
            return [] if ledger.messages else [message(f"m{id(ledger)}")]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.tell("run", [], first_only), range(12)))

        assert len(store.outbox("run")) == 1

    def test_an_acknowledgement_stays_unless_a_worse_one_comes(self, store: Store) -> None:
        """Whoever was first has it; what covers more replaces."""
        fill(store)
        store.put_alerts([alert("a1")], [])
        first = Acknowledgement("a1", "run", "ann", "é", 1.0, Severity.WARNING)
        again, worse = replace(first, by="bob"), replace(first, by="cy", severity=Severity.CRITICAL)

        assert [store.acknowledge(each) for each in (first, again, worse, first)] == [first, first, worse, worse]
        assert self.reopen(store).acknowledgements("run") == store.acknowledgements() == [worse]

    def test_acknowledgements_and_ledgers_need_their_run(self, store: Store) -> None:
        """Asking, putting and telling."""
        with pytest.raises(RunNotFoundError, match="run"):
            store.acknowledge(Acknowledgement("a1", "run", "ann"))
        with pytest.raises(RunNotFoundError, match="run"):
            store.acknowledgements("run")
        with pytest.raises(RunNotFoundError, match="run"):
            store.tell("run", [], lambda _: [])
        with pytest.raises(RunNotFoundError, match="run"):
            store.ledger("run")

    def test_a_run_nobody_alerted_on_has_an_empty_ledger(self, store: Store) -> None:
        """Asking makes nothing."""
        fill(store)

        assert (store.ledger("run"), store.acknowledgements("run"), store.silences()) == (Ledger(), [], [])

    def test_a_silence_comes_back_whole_to_every_process(self, store: Store) -> None:
        """Oldest first; ending one replaces it."""
        other = Silence("s0", "bob", "", 11.0, 12.0)
        for silence in (QUIET, other):
            store.put_silence(silence)
        assert self.reopen(store).silences() == [QUIET, other]

        store.put_silence(replace(QUIET, until=15.0))
        assert store.silences() == [replace(QUIET, until=15.0), other]

    def test_one_caller_at_a_time_holds_the_store(self, store: Store) -> None:
        """Over all threads (and processes): what it reads nobody changes meanwhile."""
        fill(store)
        store.put_alerts([alert("a1", state=AlertState.FIRING)], [])

        def tell_once(number: int) -> None:
            with store.exclusive():
                if not store.ledger("run").messages:
                    store.put_alerts([], [message(f"m{number}")])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(tell_once, range(8)))

        assert len(store.outbox("run")) == 1
