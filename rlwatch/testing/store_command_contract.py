"""Contract: commands are rows that go one way, each handed out once and answered once."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlwatch.errors import RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import Command, CommandStatus
from rlwatch.testing.store_hooks import StoreHooks, command, fill


class CommandContract(StoreHooks):
    """Queued, claimed, settled; or expired."""

    def test_a_command_comes_back_as_it_was_submitted(self, store: Store) -> None:
        """Every field, from any opener."""
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
        """Typing errors must not look like orders given."""
        fill(store)
        with pytest.raises(RunNotFoundError, match="absent"):
            store.submit(command(run_id="absent"))
        with pytest.raises(RunNotFoundError, match="absent"):
            store.commands("absent")
        with pytest.raises(RunNotFoundError, match="absent"):
            store.claim("absent", 0.0)

    def test_a_run_nobody_asked_anything_has_no_commands(self, store: Store) -> None:
        """And polling it is no error."""
        fill(store)

        assert (store.commands("run"), store.claim("run", 1.0)) == ([], [])

    def test_the_same_click_twice_is_one_command(self, store: Store) -> None:
        """The key counts within a run; an empty key is none; the same id is the same command."""
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
        """Oldest first, with the time."""
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
        """A restarted trainer must not obey last night's click; 0 means never."""
        fill(store)
        for command_id, expires_at in (("old", 9.0), ("now", 10.0), ("later", 10.5), ("never", 0.0)):
            store.submit(command(command_id, expires_at=expires_at))

        assert [each.command_id for each in store.claim("run", 10.0)] == ["later", "never"]
        expired = store.commands("run", CommandStatus.EXPIRED)
        assert [(each.command_id, each.finished_at) for each in expired] == [("old", 10.0), ("now", 10.0)]

    def test_settling_answers_with_step_and_result(self, store: Store) -> None:
        """Done or rejected."""
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
        """And whoever comes second learns it."""
        fill(store)
        store.submit(command())
        store.claim("run", 1.0)
        first = store.settle("run", "c1", CommandStatus.DONE, 2.0, step=7, result="yes")

        assert store.settle("run", "c1", CommandStatus.REJECTED, 3.0, step=8, result="no") == first
        assert store.commands("run") == [first]

    def test_an_expired_command_stays_expired(self, store: Store) -> None:
        """Nobody may say later that it was done."""
        fill(store)
        store.submit(command(expires_at=1.0))
        store.claim("run", 2.0)

        late = store.settle("run", "c1", CommandStatus.DONE, 3.0, step=1, result="done")
        assert late.status is CommandStatus.EXPIRED

    def test_settling_what_cannot_be_settled_is_refused(self, store: Store) -> None:
        """Unknown, not claimed yet, or to something that is no answer."""
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
        """Trainer and a stray second trainer, say."""
        fill(store)
        names = {store.submit(command(f"c{number}")).command_id for number in range(20)}

        with ThreadPoolExecutor(4) as pool:
            claimed = [each for part in pool.map(lambda _: store.claim("run", 1.0), range(8)) for each in part]

        assert sorted(each.command_id for each in claimed) == sorted(names)

    def test_commands_do_not_need_the_writer(self, store: Store) -> None:
        """They are asked for by others, while it lives and after it has gone."""
        writer = store.open_run(command_run := fill(store))
        store.submit(command())
        assert len(store.claim("run", 1.0)) == 1
        writer.close()
        assert command_run.run_id == "run"
        assert len(self.reopen(store).commands("run")) == 1

    def test_every_answer_is_kept(self, store: Store) -> None:
        """Failed, expired in the hands of the trainer, or cancelled there."""
        fill(store)
        answers = (CommandStatus.FAILED, CommandStatus.EXPIRED, CommandStatus.CANCELLED)
        for answer in answers:
            store.submit(command(answer.value))
        store.claim("run", 1.0)
        for answer in answers:
            store.settle("run", answer.value, answer, 2.0, step=None, result="why")

        assert [each.status for each in self.reopen(store).commands("run")] == list(answers)

    def test_a_queued_command_is_cancelled_at_once(self, store: Store) -> None:
        """And never handed out."""
        fill(store)
        store.submit(command())
        cancelled = store.cancel("run", "c1", 3.0, result="by ann")

        assert (cancelled.status, cancelled.finished_at, cancelled.result) == (CommandStatus.CANCELLED, 3.0, "by ann")
        assert self.reopen(store).claim("run", 4.0) == []
        assert store.commands("run") == [cancelled]

    def test_a_claimed_command_is_let_go_by_whoever_claimed_it(self, store: Store) -> None:
        """Only they know whether it was begun; then its answer stays what it was."""
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
        """Expired, say; what is unknown is an error."""
        fill(store)
        store.submit(command(expires_at=1.0))
        store.claim("run", 2.0)

        assert store.cancel("run", "c1", 3.0, result="by ann").status is CommandStatus.EXPIRED
        with pytest.raises(StoreError, match="c9"):
            store.cancel("run", "c9", 3.0, result="by ann")
        with pytest.raises(RunNotFoundError, match="absent"):
            store.cancel("absent", "c1", 3.0, result="by ann")

    def test_a_command_is_claimed_or_cancelled_never_both(self, store: Store) -> None:
        """Whichever comes first, from many threads."""
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
