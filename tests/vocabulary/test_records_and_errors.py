"""The words every room shares: records that cannot change, errors that say what to do, clocks that only go on."""

import dataclasses
import importlib
import inspect
import math
import pickle
import time

import numpy as np
import pytest

from rlwatch import errors, ports, records
from rlwatch.clock import ManualClock, SystemClock
from rlwatch.errors import ConfigError, ImportFormatError, MissingExtraError, RLWatchError, StoreError, StoreURLError
from rlwatch.ports import Checkpoint, Delivery, Progress, Series
from rlwatch.records import (
    Acknowledgement,
    Alert,
    AlertState,
    AuditEntry,
    ClosedStep,
    Command,
    CommandStatus,
    CompletionBatch,
    Curation,
    Event,
    Finding,
    ForecastAnswer,
    ForecastRecord,
    Ledger,
    OutboxMessage,
    OutboxStatus,
    Purge,
    RunEdit,
    RunInfo,
    RunState,
    Severity,
    Silence,
    SpikeBatch,
    StepRecord,
)

RECORDS = [
    RunInfo("r"),
    RunEdit("r", "ann@lab", 1.0, name="best", tagged=("paper",)),
    Curation(notes="n", deleted_at=2.0, deleted_by="ann@lab"),
    Purge("r", "p", "s3", "ann@lab", 3.0, "bob@lab", 2.0),
    StepRecord(1, {"kl": 0.5}),
    ClosedStep(1, {"kl": 0.5}),
    SpikeBatch(1, {"logp": np.zeros(2)}),
    CompletionBatch(1, {"completion": ["a"]}),
    Event("note"),
    Finding("d", "k", Severity.INFO, 2, 1, "m"),
    Alert("a", "r", "rule", "k", Severity.INFO, AlertState.PENDING, 1, 2, "m"),
    OutboxMessage("m", "r", "a", "webhook", {}),
    Command("c", "r", "reset-reference"),
    Acknowledgement("a", "r", "ann@lab"),
    Silence("s", "ann@lab", "maintenance", 0.0, 3600.0),
    Ledger(),
    AuditEntry("e", 1.0, "ann@lab", "note", "the judge was down", "r", "a"),
    ForecastAnswer("r", 40, right=True, by="ann@lab"),
    ForecastRecord(1, {"forecast/p50": 0.5}),
    Checkpoint(7, 1, 3, "by", b"body"),
    Progress((1, 2), 7),
    Delivery(True),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_a_record_cannot_be_changed_nor_grown(record):
    """What one thread hands to another stays what it was."""
    name = dataclasses.fields(record)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    with pytest.raises((AttributeError, TypeError)):
        record.surprise = 1


def test_every_record_of_the_module_is_among_those_tested():
    """A new one has to be frozen too."""
    defined = {
        c
        for m in (records, ports)
        for _, c in inspect.getmembers(m, dataclasses.is_dataclass)
        if c.__module__ == m.__name__
    }

    assert defined == {type(r) for r in RECORDS} | {Series}


@pytest.mark.parametrize(
    "record", [r for r in RECORDS if not isinstance(r, SpikeBatch | CompletionBatch)], ids=lambda r: type(r).__name__
)
def test_a_record_survives_pickling_and_replacing(record):
    """Other processes and later rows get an equal one."""
    assert pickle.loads(pickle.dumps(record)) == record
    assert dataclasses.replace(record) == record


def test_records_of_one_kind_share_no_mapping():
    """A default is made anew for each."""
    assert RunInfo("a").config is not RunInfo("b").config
    assert Event("a").body is not Event("b").body
    assert (
        Finding(*["d"] * 2, Severity.INFO, 1, 1, "").evidence
        is not Finding(*["d"] * 2, Severity.INFO, 1, 1, "").evidence
    )


def test_severities_are_ordered_by_rank():
    """Their names are not in order: comparing text would put critical first."""
    ranked = sorted(Severity, key=lambda s: s.rank)

    assert [s.value for s in ranked] == ["info", "warning", "critical"]
    assert [s.rank for s in ranked] == [0, 1, 2]
    assert min(Severity) is Severity.CRITICAL


@pytest.mark.parametrize(
    ("states", "texts"),
    [
        (RunState, ["running", "finished", "crashed", "unfinished"]),
        (
            CommandStatus,
            ["queued", "claimed", "cancelling", "done", "rejected", "failed", "expired", "cancelled"],
        ),
        (AlertState, ["pending", "firing", "resolved"]),
        (OutboxStatus, ["pending", "sent", "dead"]),
        (Severity, ["info", "warning", "critical"]),
    ],
)
def test_states_are_the_text_that_is_stored(states, texts):
    """Renaming one would orphan rows already written."""
    assert [str(state) for state in states] == texts
    assert [states(text) for text in texts] == list(states)


def test_a_new_record_is_at_the_beginning_of_its_life():
    """First attempt, running, queued, pending, not yet numbered."""
    assert (RunInfo("r").attempt, RunInfo("r").state, RunInfo("r").last_step) == (1, RunState.RUNNING, None)
    assert (StepRecord(1, {}).seq, StepRecord(1, {}).attempt, Event("x").seq, Event("x").step) == (0, 1, 0, None)
    assert (Command("c", "r", "k").status, Command("c", "r", "k").force) == (CommandStatus.QUEUED, False)
    assert (OutboxMessage("m", "r", "a", "c", {}).status, OutboxMessage("m", "r", "a", "c", {}).attempts) == (
        OutboxStatus.PENDING,
        0,
    )
    assert (Delivery(False).retryable, Delivery(False).retry_after_s) == (True, None)


def test_the_first_measured_of_several_names_is_read():
    """Zero, NaN and infinity are measurements; absent is None."""
    step = ClosedStep(1, {"zero": 0.0, "nan": math.nan, "inf": math.inf})

    assert step.get("absent", "zero", "inf") == 0.0
    assert math.isnan(step.get("nan", "zero"))
    assert step.get("absent") is None
    assert step.get() is None


@pytest.mark.parametrize(
    ("columns", "length"),
    [({}, 0), ({"text": ["a", "b"]}, 2), ({"logp": np.zeros(3), "ratio": np.ones(3)}, 3), ({"logp": np.zeros(0)}, 0)],
)
def test_a_spike_batch_is_as_long_as_its_columns(columns, length):
    """Also where there are none."""
    assert len(SpikeBatch(1, columns)) == length
    assert len(CompletionBatch(1, columns)) == length


def test_every_error_is_one_of_rlwatch_and_says_what_it_means():
    """So that one except clause, and the command line, catch them all."""
    ours = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]

    assert [c.__name__ for c in ours if not issubclass(c, RLWatchError)] == []
    assert [c.__name__ for c in ours if not c.__doc__] == []
    assert not issubclass(RLWatchError, (ValueError, OSError))


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("StoreURLError", (StoreError, ConfigError)),
        ("StoreVersionError", (StoreError,)),
        ("StoreCorruptError", (StoreError,)),
        ("StoreFullError", (StoreError,)),
        ("StoreBusyError", (StoreError,)),
        ("RunNotFoundError", (StoreError,)),
        ("RunLockedError", (StoreError,)),
        ("ControlUnavailableError", (StoreError,)),
        ("MissingExtraError", (ConfigError, ImportError)),
    ],
)
def test_errors_can_be_caught_by_what_they_concern(name, bases):
    """A wrong store URL is a setting, a missing extra an import."""
    assert all(issubclass(getattr(errors, name), base) for base in bases)
    assert issubclass(StoreURLError, ConfigError)
    assert not issubclass(StoreError, ConfigError)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (None, "run.jsonl: no metrics; name one"),
        (3, "run.jsonl:3: no metrics; name one"),
        (0, "run.jsonl:0: no metrics; name one"),
    ],
)
def test_an_import_error_points_at_its_line(line, text):
    """In the form editors and compilers use."""
    error = ImportFormatError("run.jsonl", "no metrics; name one", line)

    assert str(error) == text
    assert (error.source, error.problem, error.line) == ("run.jsonl", "no metrics; name one", line)


def test_a_missing_extra_says_what_to_type():
    """What was wanted, what is missing, and the command that brings it."""
    error = MissingExtraError("streamlit", "app", "`rlwatch ui`")

    assert str(error) == (
        "`rlwatch ui` needs the package 'streamlit', which is not installed; run: pip install 'rlwatch-monitor[app]'"
    )
    with pytest.raises(ImportError):
        raise error


def test_a_manual_clock_moves_only_when_told_and_never_back():
    """By what it was told, also by nothing."""
    clock = ManualClock(100.0)
    clock.advance(2.5)
    clock.advance(0.0)

    assert (clock.now(), clock.monotonic()) == (102.5, 102.5)
    with pytest.raises(ValueError, match=r"cannot go back: got -0\.1 s"):
        clock.advance(-0.1)
    assert clock.now() == 102.5


def test_a_manual_clock_starts_at_a_time_that_is_no_special_case():
    """Not zero, which many rows read as never."""
    assert ManualClock().now() > 0.0


def test_the_system_clock_tells_wall_and_monotonic_time_apart():
    """One for people, one for intervals."""
    clock, wall, ticks = SystemClock(), time.time(), time.monotonic()

    assert wall <= clock.now() <= time.time()
    assert ticks <= clock.monotonic() <= time.monotonic()


@pytest.mark.parametrize("module", ["records", "ports", "errors", "clock", "metrics.rows", "metrics.reading"])
def test_the_ground_floor_says_what_each_word_means(module):
    """Every public class has a docstring."""
    found = importlib.import_module(f"rlwatch.{module}")
    public = [
        c for n, c in inspect.getmembers(found, inspect.isclass) if c.__module__ == found.__name__ and n[0] != "_"
    ]

    assert public
    assert [c.__name__ for c in public if not c.__doc__ or c.__doc__.startswith(f"{c.__name__}(")] == []
