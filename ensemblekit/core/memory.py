"""Memory: how much of it this process may use, the share that data may take, and how malloc treats freed blocks."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SHARE_FOR_DATA = 0.25
# from glibc's malloc.h
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1
_CGROUP_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}
"""Type of the file system of control groups, version 2 or 1, and the file with a group's limit."""


def memory_limit() -> int:
    """Return the number of bytes that this process may use.

    It is the smallest of the physical memory, the limits of the control groups that the process is in (containers,
    batch systems) and its limit of address space (``ulimit -v``).
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_limits()]
    return min([*limits, *_address_space()])


def fits_in_memory(num_bytes: int) -> bool:
    """Return whether data of that size fits in the share of memory that it may take: a quarter of `memory_limit`."""
    return num_bytes <= SHARE_FOR_DATA * memory_limit()


def cgroup_limits(root: Path = Path("/")) -> Iterator[int]:
    """Read the memory limits of this process's control group and of the groups around it.

    Args:
        root: Root of the file system; another one for tests.

    Yields:
        Limits in bytes, of version 2 and of version 1; nothing where there are none.
    """
    groups = _memory_groups(_lines(root / "proc/self/cgroup"))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, _, options = (*file_system.split(" "), "", "")[:3]
        is_memory = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        if not is_memory or kind not in groups:
            continue
        top, mount_point = map(_unescaped, mount.split(" ")[3:5])
        # In a container without a namespace of its own, the group's path starts with the path that is mounted.
        relative = groups[kind].removeprefix(top.rstrip("/")) if groups[kind].startswith(top) else ""
        group = Path(mount_point.lstrip("/"), relative.strip("/"))
        for folder in (group, *group.parents):
            for text in _lines(root / folder / _CGROUP_FILES[kind]):
                if text.isdecimal():  # not "max"
                    yield int(text)
            if folder == Path(mount_point.lstrip("/")):
                break


def _memory_groups(lines: list[str]) -> dict[str, str]:
    """Return the path of the group that accounts for memory by the type of file system, from /proc/self/cgroup."""
    groups = {}
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux, or no such group
        return []


def _unescaped(path: str) -> str:
    """Resolve the octal escapes that /proc uses for blanks in paths."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _address_space() -> list[int]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [soft] if soft != resource.RLIM_INFINITY else []


@cache
def keep_freed_memory() -> bool:
    """Let malloc keep freed memory for reuse: faster training steps, at the price of a process that returns none.

    The command line does this for its own process; in Python it is the caller's choice, as it affects the whole
    process. Every step frees and allocates the same large blocks. By default glibc returns them to the system, which
    maps them again page by page, zeroed: in small steps that takes as long as the arithmetic. All threads share one
    arena, because the arenas of single threads return memory in any case. It cannot be undone.

    Returns:
        Whether malloc was changed: not without glibc, and not if the environment sets ENSEMBLEKIT_KEEP_MEMORY=0.
    """
    if sys.platform != "linux" or os.environ.get("ENSEMBLEKIT_KEEP_MEMORY") == "0":
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if set_option is None:
        return False
    options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    return all(set_option(option, value) == 1 for option, value in options)
