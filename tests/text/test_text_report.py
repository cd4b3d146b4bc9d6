"""A few completions in, canonical metrics out."""

import sys
import threading
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlwatch.clock import ManualClock
from rlwatch.errors import ConfigError
from rlwatch.metrics import BY_NAME
from rlwatch.text import Sample, TextProbe, text_report

LOOP = Sample("the answer is 42. " * 1000)
CLEAN = Sample("A proof needs no more than this. It follows from the first lemma." * 4, ids=[1, 2], again=[1, 2])
DRIFTED = Sample("кот sat�", ids=[1, 2, 3, 4], again=[1, 9, 4], turns=[([1], [2]), ([1, 2, 3], [4]), ([7], [8])])


def test_the_report_is_a_mean_over_what_each_sample_can_tell():
    """Short texts have no ratio, samples without ids do not drift, conversations of one turn keep no prefix."""
    got = text_report([LOOP, CLEAN, DRIFTED])

    assert got["text/zlib_ratio_max"] > 100
    assert got["text/repetition_frac"] == pytest.approx(1 / 3)
    assert got["text/replacement"] == pytest.approx(1 / 8 / 3)
    assert got["text/retok_exact"] == 0.5
    assert got["text/retok_edit"] == 0.25
    assert got["text/retok_naive"] == 0.375
    assert got["text/retok_first"] == 1.0
    assert got["text/retok_growth"] == -0.5
    assert got["text/turn_prefix_kept"] == 0.5


def test_every_name_is_in_the_table():
    """And every metric of sampled text can be had."""
    got = text_report([LOOP, CLEAN, DRIFTED])

    assert set(got) <= set(BY_NAME)
    assert set(got) == {m.name for m in BY_NAME.values() if m.aggregator.startswith("sampled")}


@pytest.mark.parametrize("samples", [[], [Sample()], [Sample(ids=[], again=[])]])
def test_nothing_sampled_is_nothing_reported(samples):
    """Absent, not 0."""
    assert text_report(samples) == {}


@given(
    st.lists(
        st.builds(
            Sample,
            st.none() | st.text(max_size=300),
            st.none() | st.lists(st.integers(0, 9)),
            st.none() | st.lists(st.integers(0, 9)),
        ),
        max_size=5,
    )
)
def test_every_value_lies_within_the_range_of_its_row(samples):
    """Whatever was sampled."""
    for name, value in text_report(samples).items():
        row = BY_NAME[name]
        assert row.low is None or value >= row.low
        assert row.high is None or value <= row.high


class Letters:
    """A tokenizer of letters; it can be made to wait, or to fail."""

    def __init__(self, go=None, broken=False):
        self.go, self.broken, self.threads = go, broken, set()

    def decode(self, token_ids, **kwargs):
        self.threads.add(threading.current_thread())
        if self.go is not None:
            self.go.wait(10)
        if self.broken:
            raise RuntimeError("Already borrowed")
        return "".join(chr(97 + i) for i in token_ids)

    def encode(self, text, **kwargs):
        return [ord(character) - 97 for character in text]


def test_a_probe_works_on_another_thread_and_reports_once():
    """What was offered at one step is taken at a later one."""
    tokenizer = Letters()
    probe = TextProbe(tokenizer, seconds=0)

    assert probe.offer([Sample(ids=[0, 1, 2])])

    assert probe.take(wait=True)["text/retok_exact"] == 1.0
    assert probe.take() == {}
    assert threading.current_thread() not in tokenizer.threads
    probe.close()


def test_a_probe_under_way_takes_nothing_more_and_makes_nobody_wait():
    """An offer is refused, a report not ready is empty."""
    go = threading.Event()
    probe = TextProbe(Letters(go), seconds=0)
    probe.offer([Sample(ids=[0])])

    assert not probe.offer([Sample(ids=[1])])
    assert probe.take() == {}

    go.set()
    assert probe.take(wait=True)
    probe.close()


def test_a_probe_rests_between_reports():
    """By the clock, whatever the pace of the steps."""
    clock = ManualClock()
    probe = TextProbe(seconds=30, clock=clock)
    probe.offer([CLEAN])
    probe.take(wait=True)
    clock.advance(29)

    assert not probe.offer([CLEAN])

    clock.advance(1)
    assert probe.offer([CLEAN])
    probe.close()
    assert not probe.due()


@pytest.mark.parametrize(("offered", "read"), [(1, [0]), (3, [0, 1, 2]), (8, [0, 2, 5])])
def test_few_samples_are_read_evenly_and_without_chance(offered, read):
    """No random number is drawn."""
    seen = []

    class Noting(Letters):
        def decode(self, token_ids, **kwargs):
            seen.append(token_ids[0])
            return super().decode(token_ids)

    probe = TextProbe(Noting(), most=3, seconds=0)
    probe.offer([Sample(text="", ids=[i]) for i in range(offered)])
    probe.take(wait=True)

    assert seen == read
    probe.close()


def test_what_the_work_raised_is_raised_where_it_is_taken_and_the_probe_goes_on():
    """There the error boundary counts it."""
    tokenizer = Letters(broken=True)
    probe = TextProbe(tokenizer, seconds=0)
    probe.offer([Sample(ids=[0])])

    with pytest.raises(RuntimeError, match="Already borrowed"):
        probe.take(wait=True)

    tokenizer.broken = False
    assert probe.offer([Sample(ids=[0])])
    assert probe.take(wait=True)
    probe.close()


@pytest.mark.parametrize("settings", [{"most": 0}, {"seconds": -1}, {"seconds": float("nan")}])
def test_settings_that_make_no_sense_are_refused(settings):
    """With the values got."""
    with pytest.raises(ConfigError, match="text probe needs"):
        TextProbe(**settings)


def test_the_room_imports_neither_torch_nor_numpy():
    """Any process can measure text."""
    code = "import rlwatch.text, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"

    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
