"""``--pattern``: lines of a log nobody knows, read by a regular expression of the user's."""

import math
from pathlib import Path

import pytest

from rlwatch.errors import ImportFormatError
from rlwatch.importers import LogTail, read_log

ODD = "".join(
    f"12:00 | pid=7 | it<{step}> Q={'nan' if step == 3 else step * 0.5} H={2 - step * 0.1:.2f} {'ok' * 3}\n"
    for step in range(1, 9)
)
IN_ONE = r"it<(?P<step>\d+)> Q=(?P<reward>\S+) H=(?P<policy_entropy>\S+)"
PAIRS = r"it<(?P<step>\d+)>|(?P<name>[QH])=(?P<value>\S+)"
SPREAD = "".join(
    f"begin {step}\nreward -> {step}e-1\nnoise\nkl -> {'inf' if step == 2 else 0.25}\n" for step in (1, 2, 3)
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Path of the odd log."""
    path = tmp_path / "odd.log"
    path.write_text(ODD)
    return path


def rows(path: Path, pattern: str) -> list[tuple[int, int, dict[str, float]]]:
    """Attempt, step and metrics of every record."""
    (run,) = read_log(path, format="pattern:" + pattern)
    return [(record.attempt, record.step, dict(record.metrics)) for record in run.records]


def test_nothing_of_the_log_is_read_without_a_pattern(log):
    """It is odd indeed."""
    with pytest.raises(ImportFormatError, match="no known format"):
        read_log(log)


@pytest.mark.parametrize(("pattern", "reward", "entropy"), [(IN_ONE, "reward", "policy_entropy"), (PAIRS, "Q", "H")])
def test_groups_say_what_is_what(log, pattern, reward, entropy):
    """A group a metric, or a name with its value; NaN is a value. Names are the user's, so Q and H must be known ones."""
    if pattern is PAIRS:
        log.write_text(ODD.replace("Q=", "reward=").replace("H=", "entropy="))
        pattern, reward, entropy = PAIRS.replace("[QH]", "reward|entropy"), "reward", "entropy"
    read = rows(log, pattern)

    assert [(attempt, step) for attempt, step, _ in read] == [(1, step) for step in range(1, 9)]
    assert [metrics[entropy] for *_, metrics in read] == pytest.approx([2 - step * 0.1 for step in range(1, 9)])
    assert [step for _, step, metrics in read if math.isnan(metrics[reward])] == [3]


def test_what_is_printed_of_a_step_on_several_lines_is_one_row(tmp_path):
    """And infinity is a value."""
    log = tmp_path / "spread.log"
    log.write_text(SPREAD)

    assert rows(log, r"begin (?P<step>\d+)|(?P<name>\w+) -> (?P<value>\S+)") == [
        (1, 1, {"reward": 0.1, "kl": 0.25}),
        (1, 2, {"reward": 0.2, "kl": math.inf}),
        (1, 3, {"reward": pytest.approx(0.3), "kl": 0.25}),
    ]


def test_steps_that_come_again_are_another_attempt_and_lines_without_a_step_are_numbered(log):
    """As in every other format."""
    log.write_text(ODD + ODD)
    again = rows(log, IN_ONE)

    assert [attempt for attempt, *_ in again] == [1] * 8 + [2] * 8
    assert [step for _, step, _ in rows(log, r"Q=(?P<reward>\S+)")] == list(range(1, 17))


def test_a_value_that_is_no_number_is_counted_and_what_comes_before_the_first_step_too(tmp_path):
    """Nothing is lost silently."""
    log = tmp_path / "half.log"
    log.write_text("reward 1\nstep 1\nreward 2\nreward 50%\nstep x9\nstep 2\nreward 3\n")
    (run,) = read_log(log, format=r"pattern:step (?P<step>\S+)|(?P<name>reward) (?P<value>\S+)")

    assert [(record.step, dict(record.metrics)) for record in run.records] == [(1, {"reward": 2}), (2, {"reward": 3})]
    assert [(skipped.count, skipped.reason) for skipped in run.skipped] == [
        (1, "a value before the first step"),
        (1, "'reward' is not a number"),
        (1, "the step must be an integer, got 'x9'"),
    ]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_following_it_while_it_grows_gives_the_same(log, size):
    """However the writing fell."""
    expected = rows(log, IN_ONE)
    whole, followed = log.read_bytes(), []
    log.write_bytes(b"")
    tail = LogTail(log, format="pattern:" + IN_ONE)
    for at in range(0, len(whole), size):
        with log.open("ab") as file:
            file.write(whole[at : at + size])
        followed += tail.poll()
    followed += tail.close()

    assert repr([(record.attempt, record.step, dict(record.metrics)) for record in followed]) == repr(expected)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("it (", "is not a regular expression"),
        (r"it (?P<step>\d+)", "names no metric"),
        (r"(?P<name>\w+)=\d", r"has no group \(\?P<value>"),
        (r"(?P<value>\d+)", r"has no group \(\?P<name>"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused_with_what_it_lacks(log, pattern, says):
    """Before the log is opened."""
    with pytest.raises(ImportFormatError, match=says):
        read_log(log, format="pattern:" + pattern)
