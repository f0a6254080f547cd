"""How a process that reads captures keeps its memory.

Duty: arrays of a few hundred kilobytes come and go by the thousand. As allocators are set by default each of them is
taken from the kernel and given back, and its pages are cleared and mapped anew: a sixth of the CPU time of
`kproxy convert`. Here what is freed stays, and is used again.

Memory: KEPT_BYTES at most that nobody uses. Refuses to know what it is used for.
"""

import ctypes

import pyarrow as pa

KEPT_BYTES = 1 << 28
LARGEST_BYTES = 1 << 25  # of one piece; glibc takes no more
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_ of glibc's mallopt(3)


def retain() -> None:
    """For the rest of the process, one allocator for all, which keeps what is freed."""
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
