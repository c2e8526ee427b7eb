"""Settings of the C allocator for a process that runs tensors of the same sizes over and over."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def reuse_freed_memory() -> bool:
    """Keep freed memory in the process instead of giving it back to the system (glibc only).

    By default glibc maps every large block anew, and each first touch of a page is a fault: on
    virtual machines that costs more than the arithmetic on it. Peak memory may grow a little.

    Returns:
        Whether the settings were applied.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(option, value)
        for option, value in (
            (_M_MMAP_MAX, 0),
            (_M_TRIM_THRESHOLD, 2**31 - 1),
            (_M_TOP_PAD, 64 * 2**20),
        )
    )
