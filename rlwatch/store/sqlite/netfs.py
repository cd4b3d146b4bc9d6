"""Whether a path lies on a network file system, where SQLite's write-ahead log does not work."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb2",
    "smb3",
    "smbfs",
    "wekafs",
}
# FUSE mounts are remote (sshfs, s3fs, gcsfuse, juicefs...) unless known to be a view of a local disk.
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.bindfs"}
_ESCAPED = re.compile(r"\\([0-7]{3})")  # mountinfo writes space, tab, newline and backslash as octal


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Type of the network file system ``path`` is (or would be) on; None on a local disk.

    The mount whose directory is the longest prefix of the resolved path decides; of two at one place, the
    later one, which hides the earlier. ``mounts`` is the text of ``/proc/self/mountinfo``; where there is
    none (not Linux) every path counts as local.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text(errors="replace") if _MOUNTS.exists() else ""
    target = path.resolve()
    deepest, kind = -1, ""
    for line in mounts.splitlines():
        before, separated, after = line.partition(" - ")
        fields = before.split(" ")
        if not separated or len(fields) < 5:
            continue
        directory = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4]))
        if target.is_relative_to(directory) and len(directory.parts) >= deepest:
            deepest, kind = len(directory.parts), after.split(" ")[0]
    return kind if is_network(kind) else None


def is_network(kind: str) -> bool:
    """Whether a mount type (``nfs4``, ``ext4``, ``fuse.sshfs``...) is a network one."""
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
