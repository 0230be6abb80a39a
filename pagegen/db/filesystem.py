"""Which file systems several hosts may share: SQLite's WAL needs memory shared by all who have the file open."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

# By /proc/self/mountinfo's type. Other FUSE types are taken for shared as well: a rollback journal works on all.
_SHARED = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
})  # fmt: skip
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.fuseext2", "fuse.lxcfs", "fuseblk"})


def type_of(path: Path) -> str:
    """The type of the file system that holds `path` ("ext4"), which need not exist; "" where nothing says."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    place, best, found = path.absolute().resolve(), -1, ""
    for line in lines:
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # of two mounts at one place the later one hides the other
        if place.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), after.split(" ")[0]
    return found


def is_shared(path: Path) -> bool:
    """Whether other hosts may have a file at `path` open at the same time."""
    kind = type_of(path)
    return kind in _SHARED or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)
