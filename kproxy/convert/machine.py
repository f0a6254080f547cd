"""Processors and memory that a process may use, and the settings of its allocator and garbage collector.

Duty: reads the limits of the system and of control groups, which containers use (both versions: cgroups(7),
cgroup-v2.rst). Configures an allocator that keeps freed memory: arrays of a few hundred kilobytes are allocated and
freed by the thousand. By default allocators return each to the kernel, which clears and maps the pages again: a sixth
of the CPU time of `kproxy convert`.

Memory: at most KEPT_BYTES of freed memory are kept.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
KEPT_BYTES = 1 << 28
COLLECT_AFTER = 20_000  # allocated containers per garbage collection
LARGEST_BYTES = 1 << 25  # of one allocation; glibc accepts no larger threshold
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_ of glibc's mallopt(3)


def retain() -> None:
    """Use one allocator for everything, which keeps freed memory, for the rest of the process."""
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Exchanges never form reference cycles, so collect rarely: at the default threshold GC costs 12 % of CPU.

    Flows and their sessions do form cycles. They are collected at the end, since what follows needs the memory; objects
    that existed before are not searched.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*before)
        gc.unfreeze()


def cores() -> int:
    """Return the number of processors that this process may use, within its control groups' limits; at least 1."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu"):
        told = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        if len(told) == 2 and min(told) > 0:
            shares.append(told[0] / told[1])
    return max(1, round(min(shares)))


def memory_bytes() -> int:
    """Return the bytes of memory that this process may still take; cached files of a control group count as free."""
    rooms = [_table(PROC / "meminfo").get("MemAvailable:", 1 << 52) << 10]
    for group in _groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            told = _numbers(group / limit, group / used)
            if len(told) == 2:
                table = _table(group / "memory.stat")
                files = [table.get(f"total_{name}", table.get(name, 0)) for name in ("active_file", "inactive_file")]
                rooms.append(max(0, told[0] - told[1] + sum(files)))
    return min(rooms)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own up to the last visible one."""
    with suppress(OSError):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = GROUPS / controller if controllers else GROUPS  # one tree per controller in v1, one for all in v2
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                yield folder
                if folder == root:
                    break


def _numbers(*paths: Path) -> tuple[int, ...]:
    """Return the numbers in some files; none if a file is missing, or has a word like "max"."""
    with suppress(OSError, ValueError):
        return tuple(int(word) for path in paths for word in path.read_text().split())
    return ()


def _table(path: Path) -> dict[str, int]:
    """Return a file with lines of a name and a number as a dict; empty if it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
    return {}
