"""The error boundary to a training loop: what fails of ours ends there, is counted, and is said once."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.error_boundary import LIMIT, Contained, ErrorBoundary, Reported, call_or, guarded, sheltered
from rlwatch.integrations.verl.ranks import answering
from rlwatch.recorder.losses import Counters


class Held:
    """Stands for the tensors of a step."""


def failing(error: BaseException) -> None:
    raise error


def seam_of_a_run() -> tuple[ErrorBoundary, Counters]:
    counters = Counters()
    return ErrorBoundary(SimpleNamespace(counters=counters)), counters


@pytest.mark.parametrize(
    "error", [ValueError("x"), StopIteration(), MemoryError(), AssertionError(), ExceptionGroup("g", [ValueError()])]
)
def test_any_exception_ends_inside(error: Exception) -> None:
    """Also those that generators and loops treat as signs: it is handed over as it was raised."""
    told: list[Exception] = []
    with Contained(told.append):
        failing(error)

    assert told == [error]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_ends_a_process_passes(error: BaseException) -> None:
    """Ctrl-C and exit are the trainer's, and nothing is told."""
    told: list[Exception] = []
    with pytest.raises(type(error)) as raised, Contained(told.append):
        failing(error)

    assert raised.value is error
    assert told == []


def test_work_that_does_not_fail_is_left_alone() -> None:
    """Nothing is told, and a value is returned through it."""

    def work() -> int:
        with Contained(failing):
            return 7
        return 0

    assert work() == 7


@given(st.lists(st.booleans(), max_size=30))
def test_a_tap_is_switched_off_after_its_third_failure(outcomes: list[bool]) -> None:
    """Failures are counted one by one, however many successes lie between them; then nothing of it is called."""
    error_boundary, counters = seam_of_a_run()
    called, answers = [], []

    def work(good: bool) -> str:
        called.append(good)
        return "fine" if good else failing(ValueError("no"))

    answers = [error_boundary.attempt("tap", work, good) for good in outcomes]
    expected, failures = [], 0
    for good in outcomes:
        expected.append("fine" if good and failures < LIMIT else None)
        failures += not good and failures < LIMIT

    assert answers == expected
    assert error_boundary.errors == counters["errors"] == failures == called.count(False)
    assert error_boundary.works("tap") == (failures < LIMIT)


def test_taps_fail_on_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Each is warned of at its first failure and when it is switched off, and never otherwise."""
    error_boundary, counters = seam_of_a_run()
    with caplog.at_level(logging.WARNING, "rlwatch"):
        for _ in range(LIMIT + 4):
            error_boundary.attempt("entropy", failing, ValueError("of entropy"))
        error_boundary.attempt("kl", failing, KeyError("of kl"))

    assert [record.getMessage() for record in caplog.records] == [
        "rlwatch could not read entropy (training goes on): ValueError: of entropy",
        "rlwatch switched its tap of entropy off after 3 errors",
        "rlwatch could not read kl (training goes on): KeyError: 'of kl'",
    ]
    assert (error_boundary.works("entropy"), error_boundary.works("kl")) == (False, True)
    assert counters["errors"] == LIMIT + 1


def test_a_seam_without_a_run_counts_for_itself() -> None:
    """So a process that only measures can say how often it failed."""
    error_boundary = ErrorBoundary()
    for tap in ("a", "b", "b"):
        assert error_boundary.attempt(tap, failing, OSError("gone")) is None

    assert error_boundary.errors == 3


def test_a_guarded_method_returns_none_where_it_would_raise() -> None:
    """By the name of the method; its result and its arguments pass otherwise, and interrupts do, too."""

    class Watcher:
        def __init__(self) -> None:
            self.error_boundary = ErrorBoundary()

        @guarded
        def ratio(self, a: int, *, b: int) -> float:
            """a / b."""
            if b < 0:
                raise KeyboardInterrupt
            return a / b

    watcher = Watcher()

    assert watcher.ratio(6, b=4) == 1.5
    assert watcher.ratio(6, b=0) is None
    assert watcher.error_boundary.errors == 1
    assert Watcher.ratio.__doc__ == "a / b."
    with pytest.raises(KeyboardInterrupt):
        watcher.ratio(1, b=-1)


def test_what_is_asked_of_somebody_has_an_answer_whatever_it_raises() -> None:
    """``otherwise`` says which; it may also refuse, in words of ours. Ctrl-C and exit pass."""

    def refuse(error: Exception) -> int:
        raise ValueError(f"refused: {type(error).__name__}") from None

    assert call_or(lambda: 7, lambda _: 0) == 7
    assert call_or(lambda: failing(MemoryError()), type) is MemoryError
    with pytest.raises(ValueError, match=r"^refused: KeyError$") as refused:
        call_or(lambda: failing(KeyError("k")), refuse)
    assert refused.value.__suppress_context__
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            call_or(lambda error=error: failing(error), lambda _: None)


def test_on_a_thread_of_rlwatch_only_what_is_named_passes() -> None:
    """An exit there is nobody's wish."""
    told: list[BaseException] = []
    for error in (SystemExit(3), KeyboardInterrupt(), ValueError("x")):
        assert sheltered(lambda error=error: failing(error), told.append) is None
    with pytest.raises(LookupError):
        sheltered(lambda: failing(KeyError("k")), told.append, passing=LookupError)

    assert [type(error) for error in told] == [SystemExit, KeyboardInterrupt, ValueError]
    assert sheltered(lambda: 7, told.append) == 7


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_what_is_reported_is_raised_on_unchanged(error: BaseException) -> None:
    """As the trainer would see it without us; where nothing is raised nothing is reported."""
    told: list[BaseException] = []
    with Reported(told.append):
        pass
    with pytest.raises(type(error)) as raised, Reported(told.append):
        failing(error)

    assert raised.value is error
    assert told == [error]


def test_a_failure_keeps_nothing_of_the_step_alive() -> None:
    """An error holds the frames it went through, and they what lay on the device: it is gone without the collector."""

    def step(work) -> weakref.ref:
        held = Held()
        work(held)
        return weakref.ref(held)

    def broken(held: Held, *_: object) -> None:
        inner = held
        raise RuntimeError("out of memory", id(inner))

    class Worker:
        rank = 1

        @answering
        def measure(self, held: Held) -> None:
            broken(held)

    error_boundary = ErrorBoundary()
    gc.disable()
    try:
        left = [step(lambda held: error_boundary.attempt("tap", broken, held)), step(Worker().measure)]

        assert [each() for each in left] == [None, None]
    finally:
        gc.enable()
