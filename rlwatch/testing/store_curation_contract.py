"""The part of the store's contract on users' edits of runs: names, tags, notes, archiving, deleting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import Curation, Purge, RunEdit, RunInfo
from rlwatch.testing.store_run_contract import StoreHooks, alert, fill, steps


class CurationContract(StoreHooks):
    """Users' edits of runs."""

    def test_a_run_without_edits_is_as_its_trainer_wrote_it(self, store: Store) -> None:
        """Reading creates nothing."""
        fill(store)

        assert store.run("run").curation == Curation()
        assert (store.edits("run"), store.purges(), store.runs(deleted=True)) == ([], [], [])

    def test_edits_show_at_once_and_keep_what_the_trainer_wrote(self, store: Store) -> None:
        """In every list and to every opener, also while the run is being written."""
        writer = store.open_run(RunInfo("run", name="s3", tags=("grpo", "old")))
        edits = [
            RunEdit("run", "ann", 5.0, name="best <i>é", notes="line 1\nline 2", tagged=("paper",), untagged=("old",)),
            RunEdit("run", "bob", 6.0, archived=True, tagged=("grpo", "b")),
        ]
        for edit in edits:
            shown = store.edit(edit)
        writer.write(steps(1))
        writer.close()

        assert shown.name == "best <i>é"
        assert shown.tags == ("grpo", "paper", "b")
        notes = "line 1\nline 2"
        assert shown.curation == Curation(notes, True, None, "", 6.0, "bob", "s3", ("grpo", "old"))
        again = self.reopen(store)
        assert again.edits("run") == edits
        assert [(run.name, run.tags, run.curation) for run in again.runs()] == [
            (shown.name, shown.tags, shown.curation)
        ]

    def test_an_empty_name_gives_the_trainers_back(self, store: Store) -> None:
        """As taking a tag away and giving it again does."""
        store.open_run(RunInfo("run", name="s3", tags=("a",))).close()
        store.edit(RunEdit("run", "ann", 1.0, name="x", untagged=("a",), archived=True, notes="n"))

        back = store.edit(RunEdit("run", "ann", 2.0, name="", tagged=("a",), archived=False, notes=""))

        assert (back.name, back.tags, back.curation.archived, back.curation.notes) == ("s3", ("a",), False, "")

    def test_a_resume_knows_the_trainers_words_and_keeps_peoples(self, store: Store) -> None:
        """A new name of the trainer does not undo a person's."""
        store.open_run(RunInfo("run", name="s3")).close()
        store.edit(RunEdit("run", "ann", 1.0, name="best"))

        writer = store.open_run(RunInfo("run", name="s4"))
        writer.close()

        assert writer.run.name == "s4"
        assert (store.run("run").name, store.run("run").curation.logged_name) == ("best", "s4")

    def test_a_deleted_run_is_hidden_until_it_is_restored(self, store: Store) -> None:
        """With its alerts; who deleted it first, and when, is kept, and every step of it."""
        for run_id in ("run", "other"):
            fill(store, steps(1, 2), run_id=run_id, finish=True)
            store.put_alerts([alert(f"a-{run_id}", run_id)], [])
        for by, at in (("ann", 1e10), ("bob", 2e10)):
            store.edit(RunEdit("run", by, at, deleted=True))

        hidden = self.reopen(store)
        assert [run.run_id for run in hidden.runs()] == ["other"]
        assert [(run.run_id, run.curation.deleted_by) for run in hidden.runs(deleted=True)] == [("run", "ann")]
        assert [one.run_id for one in hidden.alerts()] == ["other"]
        assert (len(hidden.records("run")), len(hidden.alerts("run"))) == (2, 1)

        store.edit(RunEdit("run", "cy", 3e10, deleted=False))
        assert len(store.runs()) == 2
        assert [edit.deleted for edit in store.edits("run")] == [True, True, False]

    def test_a_run_that_goes_on_is_not_hidden(self, store: Store) -> None:
        """One user resumed a run that another had deleted: no training is hidden."""
        fill(store, steps(1), finish=True)
        store.put_alerts([alert()], [])
        store.edit(RunEdit("run", "ann", 1e10, deleted=True))
        writer = store.open_run(RunInfo("run"))
        writer.heartbeat(2e10)
        writer.close()

        assert [run.curation.deleted for run in store.runs()] == [False]
        assert len(store.alerts()) == 1

    def test_only_what_is_deleted_can_be_purged(self, store: Store) -> None:
        """Then nothing is left of it but who did it, and its id may be used again."""
        fill(store, steps(1), finish=True)
        with pytest.raises(StoreError, match="not deleted"):
            store.purge("run", by="ann", now=3e10)
        store.edit(RunEdit("run", "ann", 1e10, deleted=True))

        purged = store.purge("run", by="bob", now=3e10)

        assert purged == Purge("run", "default", "", "bob", 3e10, "ann", 1e10)
        assert self.reopen(store).purges() == [purged]
        assert (store.runs(), store.runs(deleted=True), store.unreadable()) == ([], [], {})
        with pytest.raises(RunNotFoundError, match="run"):
            store.run("run")
        fill(store, steps(1, 2))
        assert [run.curation for run in store.runs()] == [Curation()]

    def test_a_run_with_a_writer_is_not_purged(self, store: Store) -> None:
        """Even if it is marked as deleted."""
        writer = store.open_run(RunInfo("run"))
        store.edit(RunEdit("run", "ann", 1e10, deleted=True))

        with pytest.raises(RunLockedError, match="run"):
            store.purge("run", by="ann", now=2e10)
        writer.write(steps(1))
        writer.close()
        assert len(store.records("run")) == 1

    def test_edits_of_many_people_lose_none(self, store: Store) -> None:
        """Tags are added one by one."""
        fill(store)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda k: store.edit(RunEdit("run", f"p{k}", float(k), tagged=(f"t{k}",))), range(12)))

        assert sorted(store.run("run").tags) == sorted(f"t{k}" for k in range(12))

    def test_edits_need_their_run(self, store: Store) -> None:
        """Editing, asking and purging."""
        for ask in (
            lambda: store.edit(RunEdit("absent", "ann")),
            lambda: store.edits("absent"),
            lambda: store.purge("absent", by="ann", now=1.0),
        ):
            with pytest.raises(RunNotFoundError, match="absent"):
                ask()
