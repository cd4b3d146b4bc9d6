"""Contract of a store for users' edits of runs: names, tags, notes, archiving, deleting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry, Curation, ForecastAnswer, Purge, RunEdit, RunInfo, Severity, Silence
from rlwatch.testing.store_run_contract import StoreHooks, alert, fill, steps


class CurationContract(StoreHooks):
    """Tests that a store keeps users' edits of runs and removes only runs that were deleted."""

    def test_a_run_without_edits_is_as_its_trainer_wrote_it(self, store: Store) -> None:
        """Check that reading a run that was never edited creates no edits and shows the trainer's values."""
        fill(store)

        assert store.run("run").curation == Curation()
        assert (store.edits("run"), store.purges(), store.runs(deleted=True)) == ([], [], [])

    def test_edits_show_at_once_and_keep_what_the_trainer_wrote(self, store: Store) -> None:
        """Check that edits appear in every list and to every process, also while the run is written, next to the logged
        values.
        """
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
        """Check that an edit to an empty name restores the trainer's name, and a removed tag can be added again."""
        store.open_run(RunInfo("run", name="s3", tags=("a",))).close()
        store.edit(RunEdit("run", "ann", 1.0, name="x", untagged=("a",), archived=True, notes="n"))

        back = store.edit(RunEdit("run", "ann", 2.0, name="", tagged=("a",), archived=False, notes=""))

        assert (back.name, back.tags, back.curation.archived, back.curation.notes) == ("s3", ("a",), False, "")

    def test_a_resume_knows_the_trainers_words_and_keeps_peoples(self, store: Store) -> None:
        """Check that a new name from the trainer of a resumed run does not undo a user's name."""
        store.open_run(RunInfo("run", name="s3")).close()
        store.edit(RunEdit("run", "ann", 1.0, name="best"))

        writer = store.open_run(RunInfo("run", name="s4"))
        writer.close()

        assert writer.run.name == "s4"
        assert (store.run("run").name, store.run("run").curation.logged_name) == ("best", "s4")

    def test_a_deleted_run_is_hidden_until_it_is_restored(self, store: Store) -> None:
        """Check that a deleted run and its alerts are hidden, who deleted it first is kept, and restoring brings all
        data back.
        """
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
        """Check that a deleted run that another user resumed is shown again, so that no training is hidden."""
        fill(store, steps(1), finish=True)
        store.put_alerts([alert()], [])
        store.edit(RunEdit("run", "ann", 1e10, deleted=True))
        writer = store.open_run(RunInfo("run"))
        writer.heartbeat(2e10)
        writer.close()

        assert [run.curation.deleted for run in store.runs()] == [False]
        assert len(store.alerts()) == 1

    def test_only_what_is_deleted_can_be_purged(self, store: Store) -> None:
        """Check that only a deleted run can be removed, that a note of who did it remains, and that its id can be used
        again.
        """
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
        """Check that a run that is being written cannot be removed, even if it is marked as deleted."""
        writer = store.open_run(RunInfo("run"))
        store.edit(RunEdit("run", "ann", 1e10, deleted=True))

        with pytest.raises(RunLockedError, match="run"):
            store.purge("run", by="ann", now=2e10)
        writer.write(steps(1))
        writer.close()
        assert len(store.records("run")) == 1

    def test_edits_of_many_people_lose_none(self, store: Store) -> None:
        """Check that no tag is lost if several users add tags at once."""
        fill(store)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda k: store.edit(RunEdit("run", f"p{k}", float(k), tagged=(f"t{k}",))), range(12)))

        assert sorted(store.run("run").tags) == sorted(f"t{k}" for k in range(12))

    def test_edits_need_their_run(self, store: Store) -> None:
        """Check that editing, listing edits of and removing an unknown run raise ``RunNotFoundError``."""
        for ask in (
            lambda: store.edit(RunEdit("absent", "ann")),
            lambda: store.edits("absent"),
            lambda: store.purge("absent", by="ann", now=1.0),
        ):
            with pytest.raises(RunNotFoundError, match="absent"):
                ask()


# Contract of a store: every process reads users' actions and answers unchanged.


class PeopleContract(StoreHooks):
    """Tests that a store keeps silences, audit entries and answers to forecasts."""

    def test_a_snooze_names_its_alerts_and_how_bad_they_may_get(self, store: Store) -> None:
        """Check that a silence keeps its alert ids and its highest severity, and one without either stays unlimited."""
        snooze = Silence("z1", "ann", "until the node is back", 1.0, 9.0, alerts=("a1", "é2"), up_to=Severity.WARNING)
        whole = Silence("z2", "bob", "", 2.0, 3.0)
        for silence in (snooze, whole):
            store.put_silence(silence)

        assert self.reopen(store).silences() == [snooze, whole]

    def test_what_people_did_is_kept_in_order_and_never_changed(self, store: Store) -> None:
        """Check that audit entries, about a run or about none, come back in order and that an id is written only
        once.
        """
        fill(store)
        note = AuditEntry("e1", 5.0, "ann", "note", "the judge was down ❄", "run", "a1")
        other = AuditEntry("e2", 4.0, "bob", "silence", "everything")
        for entry in (note, other, replace(note, text="never said")):
            store.put_entry(entry)

        assert self.reopen(store).audit() == [note, other]
        assert (store.audit("run"), store.audit("gone")) == ([note], [])

    def test_the_last_answer_about_a_forecast_counts(self, store: Store) -> None:
        """Check that for each attempt and step only the last answer to a forecast is kept, from whichever user."""
        fill(store)
        first = ForecastAnswer("run", 40, right=False, by="ann", why="a harmless dip", at=2.0)
        again = replace(first, right=True, by="bob", why="", at=3.0)
        later = replace(first, step=50, attempt=2)
        for answer in (later, first, again):
            store.answer_forecast(answer)

        assert self.reopen(store).forecast_answers("run") == store.forecast_answers() == [again, later]

    def test_a_new_run_has_no_answers(self, store: Store) -> None:
        """Check that reading audit and answers of a new run creates nothing, and that an answer needs an existing
        run.
        """
        with pytest.raises(RunNotFoundError, match="run"):
            store.answer_forecast(ForecastAnswer("run", 1, right=True, by="ann"))
        fill(store)

        assert (store.audit(), store.audit("run"), store.forecast_answers("run")) == ([], [], [])
