"""Runs on network file systems: written on the node, shared as snapshots."""

import errno
import os
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from rlwatch.clock import ManualClock
from rlwatch.errors import RunLockedError, RunNotFoundError, StoreError, StoreFullError
from rlwatch.records import RunInfo, RunState
from rlwatch.store.sqlite import layout
from rlwatch.store.sqlite import shared as shared_store
from rlwatch.store.sqlite.layout import is_network, network_file_system
from rlwatch.store.sqlite.shared import SharedStore
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import alert, fill, message, steps

_MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:20 / /proc rw - proc proc rw
30 22 0:40 / /home rw - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /home/ann/scratch rw - ext4 /dev/nvme0 rw
32 22 0:42 / /data\040sets rw - lustre mds@tcp:/fs rw
33 22 0:43 / /mnt/remote rw - fuse.sshfs host:/ rw
34 22 0:44 / /hidden rw - ext4 /dev/sdb rw
35 22 0:45 / /hidden rw - beegfs beegfs_nodev rw
36 22 0:46 / /merged rw - fuse.fuse-overlayfs overlay rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/runs", None),
        ("/home/ann/runs", "nfs4"),
        ("/homes/ann", None),
        ("/home/ann/scratch/runs", None),
        ("/data sets/runs", "lustre"),
        ("/mnt/remote/a/b", "fuse.sshfs"),
        ("/hidden/runs", "beegfs"),
        ("/merged/runs", None),
    ],
)
def test_the_deepest_mount_decides(path: str, kind: str | None):
    """By whole path components; the later of two mounts at one place hides the earlier."""
    assert network_file_system(Path(path), _MOUNTS) == kind


def test_links_are_followed_to_the_file_system_they_lead_to(tmp_path: Path):
    """A local link into the cluster's home is the cluster's home."""
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    mounts = f"22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 0:1 / {tmp_path}/far rw - nfs server:/ rw\n"

    assert network_file_system(tmp_path / "link" / "runs", mounts) == "nfs"
    assert network_file_system(tmp_path / "near", mounts) is None


def test_without_a_mount_table_paths_count_as_local(tmp_path: Path):
    """Not Linux."""
    assert network_file_system(tmp_path, "") is None


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "zfs", "fuseblk", ""])
def test_local_file_systems_are_local(kind: str):
    """Containers and laptops get the log."""
    assert not is_network(kind)


@pytest.fixture
def shared(tmp_path: Path) -> SharedStore:
    """A store on "NFS", on node A."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / "a" / "local", clock=ManualClock(1000.0))


def _node(tmp_path: Path, name: str) -> SharedStore:
    return SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / name / "local", clock=ManualClock(1000.0))


def test_opening_a_network_path_picks_the_shared_store_and_warns_once(tmp_path: Path, monkeypatch):
    """The warning says where the run is written and what does not work."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(layout, "network_file_system", lambda path: "lustre")
    store = open_store(tmp_path / "nfs")
    with pytest.warns(UserWarning, match=r"lustre.*node.*60 s.*commands go by files"):
        fill(store, steps(1), finish=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(store, steps(2), "second", finish=True)

    assert {run.run_id for run in open_store(tmp_path / "nfs").runs()} == {"run", "second"}


def test_snapshots_appear_at_the_start_every_minute_and_at_the_end(tmp_path: Path, shared: SharedStore):
    """Readers see whole snapshots, no log and no side files."""
    elsewhere = _node(tmp_path, "b")
    writer = shared.open_run(RunInfo("run"))
    seen = [len(elsewhere.records("run"))]
    for step, now in enumerate((1030.0, 1059.0, 1060.0, 1061.0, 1121.0)):
        writer.write(steps(step))
        writer.heartbeat(now)
        seen.append(len(elsewhere.records("run")))
    writer.write(steps(9))
    writer.finish(RunState.FINISHED, "done", 1130.0)
    writer.close()

    assert seen == [0, 0, 0, 3, 3, 5]
    assert [record.step for record in elsewhere.records("run")] == [0, 1, 2, 3, 4, 9]
    assert (elsewhere.run("run").state, elsewhere.run("run").state_reason) == (RunState.FINISHED, "done")
    assert sorted(path.name for path in (tmp_path / "nfs" / "run").iterdir()) == ["run.db", "run.lock"]


def test_a_snapshot_is_a_plain_file_for_any_sqlite(tmp_path: Path, shared: SharedStore):
    """Taken of a live run, opened by the ordinary store."""
    writer = shared.open_run(RunInfo("run"))
    writer.write(steps(1, 2))
    writer.heartbeat(2000.0)

    path = tmp_path / "nfs" / "run" / "run.db"
    assert [record.step for record in open_store(tmp_path / "nfs").records("run")] == [1, 2]
    assert path.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",), "a log needs a side file beside it"
    writer.close()


def test_the_store_says_where_it_is_in_a_form_that_opens_it(tmp_path: Path):
    """Absolute, and quoted where a path has what a URL has not."""
    root = tmp_path / "a run's #1 ?"
    store = SharedStore(root, "nfs4", local_root=tmp_path / "local", clock=ManualClock(1000.0))
    fill(store, steps(1), finish=True)

    assert [run.run_id for run in open_store(store.url).runs()] == ["run"]


def test_a_run_goes_on_elsewhere_from_the_last_snapshot(tmp_path: Path, shared: SharedStore):
    """Another node takes it over; back on the first, the stale local copy gives way."""
    fill(shared, steps(1, 2), finish=True)
    second = fill(_node(tmp_path, "b"), steps(3, attempt=2), finish=True)
    third = fill(shared, steps(4, attempt=3), finish=True)

    assert (second.attempt, third.attempt) == (2, 3)
    assert [(record.seq, record.step) for record in shared.records("run")] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_what_a_killed_writer_had_not_published_comes_with_the_resume_on_its_node(tmp_path: Path, shared: SharedStore):
    """Closed without finish stands for killed: nothing after the first snapshot was shared."""
    fill(shared, steps(1, 2, 3))
    assert _node(tmp_path, "b").records("run") == []

    fill(shared, steps(4, attempt=2), finish=True)
    assert [record.step for record in _node(tmp_path, "b").records("run")] == [1, 2, 3, 4]


def test_the_local_copy_stays_where_the_shared_one_is_no_further(tmp_path: Path, shared: SharedStore):
    """It is not fetched again over the network."""
    fill(shared, steps(1, 2), finish=True)
    local = tmp_path / "a" / "local" / "run" / "run.db"
    before = local.stat().st_ino
    fill(shared, steps(3, attempt=2), finish=True)

    assert local.stat().st_ino == before


def test_a_full_disk_that_shows_only_when_it_is_written_through_is_an_error(tmp_path: Path, shared, monkeypatch):
    """Network file systems take a write and refuse it later: nothing half is shown, and no litter is left."""
    writer = shared.open_run(RunInfo("run"))
    writer.write(steps(1))
    with monkeypatch.context() as full:

        def fsync(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "fsync", fsync)
        with pytest.raises(StoreFullError, match="nfs"):
            writer.heartbeat(1060.0)
    assert shared.records("run") == []
    assert sorted(path.name for path in (tmp_path / "nfs" / "run").iterdir()) == ["run.db", "run.lock"]

    writer.heartbeat(1065.0)
    assert [record.step for record in shared.records("run")] == [1]
    writer.close()


def test_a_damaged_local_copy_gives_way_to_the_shared_one(tmp_path: Path, shared: SharedStore):
    """A node whose disk was full, say."""
    fill(shared, steps(1, 2), finish=True)
    (tmp_path / "a" / "local" / "run" / "run.db").write_bytes(b"garbage" * 1000)

    assert fill(shared, steps(3, attempt=2), finish=True).attempt == 2
    assert [record.step for record in shared.records("run")] == [1, 2, 3]


def test_two_nodes_cannot_write_one_run(tmp_path: Path, shared: SharedStore):
    """Where the network file system can lock."""
    writer = shared.open_run(RunInfo("run"))
    with pytest.raises(RunLockedError, match="run"):
        _node(tmp_path, "b").open_run(RunInfo("run"))
    writer.close()
    _node(tmp_path, "b").open_run(RunInfo("run")).close()


def test_a_file_system_that_cannot_lock_is_let_through(tmp_path: Path, shared: SharedStore, monkeypatch):
    """The lock on the node still holds."""

    import fcntl

    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        if "/nfs/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOLCK, "No locks available")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    writer = shared.open_run(RunInfo("run"))
    with pytest.raises(RunLockedError):
        _node(tmp_path, "a").open_run(RunInfo("run"))
    writer.close()


def test_messages_stay_on_the_node(tmp_path: Path, shared: SharedStore):
    """Kept and delivered there; another node sees the alert alone, an unknown run is still unknown."""
    fill(shared)
    shared.put_alerts([alert()], [message()])
    [leased] = shared.lease_messages(1.0, lease_s=1.0)
    shared.settle_message(leased)
    elsewhere = _node(tmp_path, "b")

    assert [each.alert_id for each in shared.alerts("run")] == ["a1"]
    assert [each.message_id for each in shared.outbox()] == ["m1"]
    assert [each.alert_id for each in elsewhere.alerts()] == ["a1"]
    assert elsewhere.outbox("run") == []
    with pytest.raises(RunNotFoundError):
        elsewhere.alerts("absent")


def test_a_failed_snapshot_is_an_error_and_tried_again(tmp_path: Path, shared: SharedStore):
    """The run itself goes on; when the share is back the next one succeeds and leaves no litter."""
    writer = shared.open_run(RunInfo("run"))
    (tmp_path / "nfs" / "run").rename(tmp_path / "nfs" / "away")
    writer.write(steps(1))
    with pytest.raises(StoreError, match="nfs"):
        writer.heartbeat(1060.0)
    writer.write(steps(2))
    (tmp_path / "nfs" / "away").rename(tmp_path / "nfs" / "run")
    writer.heartbeat(1065.0)

    assert [record.step for record in shared.records("run")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "nfs" / "run").iterdir()) == ["run.db", "run.lock"]
    writer.close()


def test_the_nodes_directory_must_be_ours_and_local(tmp_path: Path, monkeypatch):
    """Anybody can make a directory in /tmp; and a second network path would be no help."""
    monkeypatch.setattr(shared_store, "network_file_system", lambda path: "nfs")
    store = SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / "also nfs" / "x")
    with pytest.raises(StoreError, match="RLWATCH_LOCAL_DIR"):
        store.open_run(RunInfo("run"))
    monkeypatch.undo()

    store = SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / "new" / "x")
    store.open_run(RunInfo("mine")).close()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "new/x")] == [0o700, 0o700]

    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    store = SharedStore(tmp_path / "nfs", "nfs4", local_root=tmp_path / "theirs" / "x")
    with pytest.raises(StoreError, match="another user"):
        store.open_run(RunInfo("run"))


def test_the_default_local_directory_is_per_user_and_per_store(tmp_path: Path, monkeypatch):
    """Two stores on one node do not meet."""
    monkeypatch.delenv("RLWATCH_LOCAL_DIR", raising=False)
    one, two = (SharedStore(tmp_path / name, "nfs4").local_root for name in ("one", "two"))
    assert one != two
    assert one.parent.name == f"rlwatch-{os.getuid()}"
