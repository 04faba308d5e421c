"""Whether a path is on a file system that other hosts reach too, and that many readers slow down."""

from __future__ import annotations

import os

# Types as /proc/self/mountinfo names them. Any FUSE mount counts, but for `fuseblk`, a local disk's.
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "beegfs", "wekafs"),
        *("panfs", "orangefs", "pvfs2", "gfs2", "ocfs2", "afs", "virtiofs", "fuse"),
    }
)


def is_shared(path: str) -> bool:
    """Whether `path`, or its nearest parent that exists, is on a network file system. Local if unknown."""
    kind = file_system(path)
    return kind in _SHARED or kind.startswith("fuse.")


def file_system(path: str) -> str:
    """The type of the file system that a path is on or would be created on; "" if it is not to be found."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            return type_in(mounts.read(), wanted)
    except FileNotFoundError:  # no Linux
        return ""


def type_in(mounts: str, device: str) -> str:
    """The type of the mount of a device, `major:minor`, in the text of a mountinfo (man 5 proc): fields 1-6,
    optional ones, a hyphen, the type."""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) > 6 and fields[2] == device and "-" in fields[6:]:
            return fields[fields.index("-", 6) + 1]
    return ""
