"""Contract of a store: every process reads users' actions and answers unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlwatch.errors import RunNotFoundError
from rlwatch.ports import Store
from rlwatch.records import AuditEntry, ForecastAnswer, Severity, Silence
from rlwatch.testing.store_run_contract import StoreHooks, fill


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
