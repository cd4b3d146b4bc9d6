"""What the judge of a run knew: the newest that fits comes back, and old ones thin out."""

from itertools import pairwise
from pathlib import Path

import pytest

from rlwatch.ports import Checkpoint, Progress
from rlwatch.records import RunInfo
from rlwatch.store.sqlite.runrow import CHECKPOINTS_KEPT
from rlwatch.store.url import open_store


@pytest.fixture(params=["sqlite", "memory"])
def store(request, tmp_path: Path):
    """An empty store of each kind."""
    return open_store(tmp_path if request.param == "sqlite" else f"memory://{tmp_path}")


def kept(store, *checkpoints: Checkpoint) -> None:
    writer = store.open_run(RunInfo("run"))
    for each in checkpoints:
        writer.write([], Progress(judged=each.seq, checkpoint=each))
    writer.close()


def made(seq: int, *, by: str = "judge 1", attempt: int = 1) -> Checkpoint:
    return Checkpoint(seq, attempt, 10 * seq, by, f"after {seq}".encode())


def all_of(store, by: str = "judge 1") -> list[int]:
    """The seq of all that are there, newest first."""
    seen: list[int] = []
    store.checkpoint("run", by, lambda seq, attempt, step: seen.append(seq) is not None)
    return seen


def test_the_newest_that_fits_comes_back_as_it_was(store):
    """Of the program that made it; another cannot read it."""
    own, others, last = made(1), made(2, by="judge 2"), Checkpoint(3, 2, 5, "judge 1", bytes(range(256)))
    kept(store, own, others, last)

    assert store.checkpoint("run", "judge 1") == last
    assert store.checkpoint("run", "judge 1", lambda seq, attempt, step: attempt == 1) == own
    assert store.checkpoint("run", "judge 1", lambda seq, attempt, step: step < 5) is None
    assert store.checkpoint("run", "judge 2") == others
    assert store.checkpoint("run", "judge 3") is None
    assert store.judged("run") == (3, 0)


def test_one_that_is_made_again_takes_the_place_of_the_other(store):
    """A judge that took the same item twice knows more the second time."""
    kept(store, made(4), Checkpoint(4, 1, 99, "judge 1", b"later"))

    assert store.checkpoint("run", "judge 1") == Checkpoint(4, 1, 99, "judge 1", b"later")


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("count", [CHECKPOINTS_KEPT, CHECKPOINTS_KEPT + 1, 60, 300])
def test_the_older_the_fewer_are_kept(store, count, every):
    """A dozen: the first, the newest, and between them holes in proportion to their age."""
    kept(store, *(made(every * n) for n in range(1, count + 1)))
    seqs = all_of(store)
    ages = [every * count - seq for seq in seqs]

    assert len(seqs) == 12
    assert (seqs[0], seqs[-1]) == (every * count, every)
    assert all(older <= 3 * younger + 2 * every for younger, older in pairwise(ages))
    assert ages[1] == every
    assert ages[2] <= 3 * every
