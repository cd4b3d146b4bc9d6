"""Contract of a store: every field of every record comes back, also one that only a newer rlwatch knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from math import inf, nan
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlwatch import codec
from rlwatch.ports import Storable, Store
from rlwatch.records import (
    Acknowledgement,
    Alert,
    AuditEntry,
    Command,
    CompletionBatch,
    Event,
    Finding,
    ForecastAnswer,
    ForecastRecord,
    OutboxMessage,
    RunEdit,
    RunInfo,
    Severity,
    Silence,
    SpikeBatch,
    Stage,
    StepRecord,
)
from rlwatch.testing.store_run_contract import StoreHooks, alert, command, fill, message, new_run

_T = TypeVar("_T")
_NEW: list[tuple[str, Any, Any]] = [
    ("hue", str, "red"),
    ("low", float, 0.0),
    ("high", float, 0.0),
    ("odd", float, 0.0),
    ("gone", float | None, 1.0),
    ("tones", tuple[str, ...], ()),
    ("calm", bool, True),
]
MORE: dict[str, Any] = {
    "hue": "bläu",
    "low": -inf,
    "high": inf,
    "odd": nan,
    "gone": None,
    "tones": ["a", "b"],
    "calm": False,
}
"""Values of the fields that only a newer rlwatch knows, as JSON."""
_NEWER_VALUES = {**MORE, "tones": ("a", "b")}


_kinds: dict[Any, Any] = {}


def _kind_of_newer(kind: Any) -> Any:
    if kind not in _kinds:
        _kinds[kind] = make_dataclass(kind.__name__, _NEW, bases=(kind,), frozen=True, slots=True)
    return _kinds[kind]


def of_newer(record: _T, **more: object) -> _T:
    """Return ``record`` as a newer version of rlwatch would make it: with fields that this version does not know.

    ``more``: values of these fields; default ones if none are given.
    """
    made: _T = _kind_of_newer(type(record))(**{**codec.encoded(record), **(more or _NEWER_VALUES)})
    return made


def extra_of(record: Any) -> str:
    """Return the fields of a record that this version of rlwatch does not know, as text, so that NaN equals itself;
    ``"None"`` without any.
    """
    return repr(getattr(record, codec.EXTRA, None))


def _rows() -> list[Storable]:
    return [
        StepRecord(0, {"kl": 0.5}, 1.0),
        of_newer(StepRecord(1, {"kl": nan}, 2.0)),
        of_newer(Event("note", 1, {"text": "x"}, 3.0)),
        StepRecord(2, {"reward": 0.5}, 4.0),
        of_newer(Finding("d", "k", Severity.INFO, 1, 1, "m", seq=2)),
        of_newer(Finding("d", "k", Severity.INFO, 2, 1, "m", seq=4, stage=Stage.RESOLVED)),
        of_newer(ForecastRecord(1, {"forecast/p50": 0.5}, {"absent": ""}, 2.0, seq=2)),
        of_newer(SpikeBatch(1, {"text": ["the"]}, "culprits", 2.0)),
        of_newer(CompletionBatch(1, {"completion": ["x"]}, 2.0)),
    ]


def _read(store: Store, run_id: str) -> Iterator[object]:
    """Return the records of ``_rows`` that a newer rlwatch wrote, read from the store in each of the ways there are."""
    yield store.records(run_id)[1]
    yield store.records(run_id, after_seq=1, limit=1)[0]
    yield store.records(run_id, last=2)[0]
    yield from store.stream(run_id, after_seq=1, limit=2)
    yield from list(store.branch(run_id, 2, 9))[1:3]
    yield from [*store.events(run_id), *store.findings(run_id), *store.recoveries(run_id)]
    yield from [*store.forecasts(run_id), *store.spikes(run_id), *store.completions(run_id)]


class FieldsContract(StoreHooks):
    """Tests that a store keeps every field of a record, also fields that this version of rlwatch does not know."""

    def test_what_a_run_holds_keeps_fields_of_a_newer_rlwatch(self, store: Store) -> None:
        """Check that rows, events, findings, forecasts, tokens and completions keep a newer version's fields in every
        query.
        """
        fill(store, _rows())

        found = list(_read(self.reopen(store), "run"))
        assert {extra_of(each) for each in found} == {repr(MORE)}
        assert len(found) == 13
        plain = [store.records("run")[0], store.records("run")[2]]
        assert [extra_of(each) for each in plain] == ["None", "None"]

    def test_a_run_keeps_fields_of_a_newer_rlwatch_when_an_older_one_resumes_it(self, store: Store) -> None:
        """Check that a resume by an older version leaves fields of the run that it does not know as they were."""
        store.open_run(of_newer(RunInfo("run", name="first"))).close()
        assert extra_of(self.reopen(store).run("run")) == repr(MORE)

        store.open_run(RunInfo("run", name="second")).close()
        run = self.reopen(store).run("run")
        assert (run.name, run.attempt, extra_of(run)) == ("second", 2, repr(MORE))
        assert [extra_of(each) for each in store.runs()] == [repr(MORE)]

    def test_edits_and_alerts_keep_fields_of_a_newer_rlwatch(self, store: Store) -> None:
        """Check that commands, alerts, messages, acknowledgements, silences, audit, answers and edits keep unknown
        fields.
        """
        fill(store, finish=True)
        store.submit(of_newer(command()))
        store.put_alerts([of_newer(alert())], [of_newer(message())])
        store.acknowledge(of_newer(Acknowledgement("a1", "run", "ann")))
        store.put_silence(of_newer(Silence("s1", "bob", "why", 1.0, 2.0)))
        store.put_entry(of_newer(AuditEntry("e1", 1.0, "ann", "note", "text", "run")))
        store.answer_forecast(of_newer(ForecastAnswer("run", 4, right=True, by="ann")))
        store.edit(of_newer(RunEdit("run", "ann", 5.0, name="best")))

        other = self.reopen(store)
        found = [*other.commands("run"), *other.alerts("run"), *other.outbox("run"), *other.acknowledgements("run")]
        found += [*other.silences(), *other.audit(), *other.forecast_answers("run"), *other.edits("run")]
        assert [extra_of(each) for each in found] == [repr(MORE)] * 8
        assert [extra_of(each) for each in other.claim("run", 6.0)] == [repr(MORE)]
        assert [extra_of(each) for each in other.lease_messages(6.0, lease_s=1.0)] == [repr(MORE)]

    def test_what_is_written_anew_keeps_only_fields_that_its_writer_does_not_know(self, store: Store) -> None:
        """Check that an update by an older version keeps unknown fields, while a newer version can reset one to its
        default.
        """
        fill(store)
        store.put_alerts([of_newer(alert())], [])
        store.put_alerts([replace(alert(), message="worse")], [])
        assert [(each.message, extra_of(each)) for each in store.alerts("run")] == [("worse", repr(MORE))]

        store.put_alerts([of_newer(alert(), hue="red", gone=None)], [])
        assert [extra_of(each) for each in self.reopen(store).alerts("run")] == ["{'gone': None}"]

    def test_the_first_of_one_id_keeps_its_own_fields(self, store: Store) -> None:
        """Check that a second record with a known id is not written, and so adds no fields to the first record."""
        fill(store)
        store.submit(command())
        store.put_alerts([], [message()])
        store.put_entry(AuditEntry("e1", 1.0, "ann", "note", "text"))
        store.submit(of_newer(command()))
        store.put_alerts([], [of_newer(message())])
        store.put_entry(of_newer(AuditEntry("e1", 1.0, "ann", "note", "text")))

        found = [*store.commands("run"), *store.outbox("run"), *store.audit()]
        assert [extra_of(each) for each in found] == ["None"] * 3

    def test_a_moment_that_is_nan_is_not_missing(self, store: Store) -> None:
        """Check that a time of NaN, an infinite time and a missing time stay different in every column."""
        fill(store)
        moments = [("a", nan), ("b", inf), ("c", None)]
        store.put_alerts([replace(alert(name), fired_at=moment) for name, moment in moments], [])

        found = {each.alert_id: repr(each.fired_at) for each in self.reopen(store).alerts("run")}
        assert found == {"a": "nan", "b": "inf", "c": "None"}

    @settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_every_field_of_every_record_survives(self, store: Store, data: st.DataObject) -> None:
        """Check that every field of every kind of record comes back with any values that its type allows."""
        run_id = new_run()
        drawn: dict[type, Any] = {kind: data.draw(any_record(kind, run_id), label=kind.__name__) for kind in _KINDS}
        writer = store.open_run(drawn[RunInfo])
        writer.write(
            [drawn[kind] for kind in (StepRecord, Event, Finding, ForecastRecord, SpikeBatch, CompletionBatch)]
        )
        writer.close()
        store.submit(drawn[Command])
        store.put_alerts([drawn[Alert]], [drawn[OutboxMessage]])
        store.acknowledge(drawn[Acknowledgement])
        store.put_silence(drawn[Silence])
        store.put_entry(drawn[AuditEntry])
        store.answer_forecast(drawn[ForecastAnswer])

        back = self.reopen(store)
        run = replace(back.run(run_id), heartbeat_at=None, last_step=None, last_ts=None)
        found = [run, *back.records(run_id), *back.events(run_id), *back.findings(run_id), *back.recoveries(run_id)]
        found += [*back.forecasts(run_id), *back.spikes(run_id), *back.completions(run_id), *back.commands(run_id)]
        found += [*back.alerts(run_id), *back.outbox(run_id), *back.acknowledgements(run_id)]
        found += [each for each in back.silences() if each.silence_id == run_id]
        found += [*back.audit(run_id), *back.forecast_answers(run_id)]
        for record in found:
            assert _shown(record) == _shown(drawn[type(record)])
        assert len(found) == len(_KINDS)


# Any record of a kind: a value for each field, by its type.

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
_FINITE = st.floats(0.0, 1e12)
_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | _TEXT, lambda x: st.lists(x, max_size=2))
_STEP = st.integers(0, 1 << 62)
_OWN: dict[str, st.SearchStrategy[Any]] = {
    "columns": st.just({"ratio": [1.5, 2.5], "text": ["a", "ä"]}),
    "metrics": st.dictionaries(_TEXT.map(lambda name: f"m{name}"), st.floats(), min_size=1, max_size=3),
    "reason": st.sampled_from(["culprits", "far-out tokens", ""]),
    "labels": st.dictionaries(_TEXT, _TEXT, max_size=2),
    "seq": st.integers(1, 99),
    "attempt": st.just(1),
    "rank": st.integers(0, 1 << 20),
    "pid": st.integers(1, 1 << 20),
    "created_at": st.floats(1.0, 1e12),
    "idempotency_key": st.just(""),
}
_OF_THE_WRITER = ("state", "state_reason", "heartbeat_at", "last_step", "last_ts", "curation")
"""Fields of a run that only its writer sets."""
_KINDS = (
    RunInfo, StepRecord, Event, Finding, ForecastRecord, SpikeBatch, CompletionBatch, Command, Alert, OutboxMessage,
    Acknowledgement, Silence, AuditEntry, ForecastAnswer,
)  # fmt: skip


def any_record(kind: type[_T], run_id: str) -> st.SearchStrategy[_T]:
    """Return a strategy for records of the class ``kind`` about the run ``run_id``."""
    values: dict[str, st.SearchStrategy[Any]] = {}
    for name in codec.plan_of(kind).names:
        hint = codec.type_of(kind, name)
        if kind is RunInfo and name in _OF_THE_WRITER:
            continue
        if name == "run_id" or name == codec.plan_of(kind).names[0] == f"{name.removesuffix('_id')}_id":
            values[name] = st.just(run_id)
        elif name == "ts":
            values[name] = st.floats()
        elif hint is float or hint == float | None:
            values[name] = _OWN.get(name, _FINITE if hint is float else st.none() | st.floats())
        else:
            values[name] = _OWN[name] if name in _OWN else _of_type(hint)
    if kind is Event:
        values["seq"] = st.integers(100, 1 << 62)  # above that of the row
    return st.builds(kind, **values)


def _of_type(hint: Any) -> st.SearchStrategy[Any]:
    if hint in (int, int | None):
        return _STEP if hint is int else st.none() | _STEP
    if hint is str:
        return _TEXT
    if getattr(hint, "__origin__", None) is tuple:
        return st.lists(_TEXT, max_size=3).map(tuple)
    if getattr(hint, "__origin__", None) is not None:
        return st.dictionaries(_TEXT, _JSON, max_size=3)
    return st.from_type(hint)


def _shown(record: Any) -> str:
    """Return a record as text, so that NaN equals itself and -0.0 differs from 0.0."""
    columns = getattr(record, "columns", {})
    others = {name: value for name, value in codec.encoded(record).items() if name != "columns"}
    return repr(
        (others, {name: list(getattr(value, "tolist", lambda v=value: v)()) for name, value in columns.items()})
    )
