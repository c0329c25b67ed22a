"""Finds the control groups (cgroups) that limit this process.

In a container, the process's own group is usually the root of the mounted directory. Outside
containers, it is deeper in the tree, where a service manager or a batch system has made it. The
groups above may have limits too, and the lowest limit applies.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(
    controller: str, *, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP
) -> Iterator[Path]:
    """Returns the directories of all groups of this process, for one controller such as `cpu`.
    Groups of cgroups version 2 precede groups of version 1, and inner groups precede outer ones.

    `cgroups` is the directory at which groups are mounted. `membership` is the file in which the
    kernel names this process's groups. A group whose directory is not mounted is left out.
    """
    own = _own_paths(membership)
    for mount, path in ((cgroups, own.get("")), (cgroups / controller, own.get(controller))):
        inside = PurePosixPath(path or "/").parts[1:]
        if ".." in inside:  # the group is above what is mounted
            inside = ()
        for depth in range(len(inside), -1, -1):
            directory = mount.joinpath(*inside[:depth])
            if directory.is_dir():
                yield directory


def _own_paths(membership: Path) -> dict[str, str]:
    """Returns the path of this process's group for each controller, by the controller's name.
    Version 2 has one group for all controllers, whose path is under the empty name."""
    if not membership.is_file():
        return {}
    lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    return {name: path for _, names, path in lines for name in names.split(",")}
