"""What a job has of this machine beside its cards: CPU RAM, shared memory, processors, room on the disk.

References: ``proc(5)`` (meminfo); the kernel's ``admin-guide/cgroup-v2.rst`` (``memory.max``, ``cpu.max``: a limit of any group above holds
too) and ``cgroup-v1/memory.rst``; ``shm_overview(7)``. A container's limits are its cgroup's.
"""

import os
from pathlib import Path

from memplan.hardware.machine import Host

GROUPS = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 2**60
"""From here on a limit is none: version 1 writes the largest multiple of a page that 63 bits hold."""
SHARED_MEMORY = Path("/dev/shm")


def host_here(folder: Path) -> Host:
    """Look at this machine; ``folder`` is where checkpoints would go."""
    return Host(
        memory_bytes=_memory_bytes(),
        limit_bytes=limit_bytes(_text(Path("/proc/self/cgroup")), GROUPS),
        num_cores=_num_cores(_text(Path("/proc/self/cgroup")), GROUPS),
        shared_bytes=_room(SHARED_MEMORY, of_all=True),
        disk_bytes=_room(folder, of_all=False),
    )


def limit_bytes(membership: str, groups: Path) -> int | None:
    """The least memory limit of a process's group and of those above it [bytes]; None: there is none.

    ``membership`` is the text of ``/proc/self/cgroup``.
    """
    found = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _limits(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(groups / "memory", path, "memory.limit_in_bytes")
    return min((each for each in found if each < UNLIMITED_BYTES), default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits of a group and of all above it, up to the root, which a container's group may be."""
    parts = [each for each in path.split("/") if each not in ("", "..")]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [int(text) for folder in folders if (text := _text(folder / name).strip()).isdecimal()]


def _num_cores(membership: str, groups: Path) -> int:
    """Processors, by affinity and by the group's quota, whichever is less."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        allowed = os.cpu_count() or 1
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            allowed = min(allowed, *quotas(groups, path), allowed)
    return max(1, allowed)


def quotas(root: Path, path: str) -> list[int]:
    """Whole processors that the quotas of a group and of those above it come to, at least one each."""
    parts = [each for each in path.split("/") if each not in ("", "..")]
    found = []
    for depth in range(len(parts) + 1):
        words = _text(root.joinpath(*parts[:depth]) / "cpu.max").split()
        if len(words) == 2 and all(each.isdecimal() and int(each) for each in words):
            found.append(max(1, int(words[0]) // int(words[1])))
    return found


def _memory_bytes() -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal":
            return int(value.split()[0]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _room(folder: Path, *, of_all: bool) -> int | None:
    """The size of a file system, or what is free of it [bytes]."""
    import shutil

    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total if of_all else usage.free


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):  # not there, or no name that a file can have
        return ""
