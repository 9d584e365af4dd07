"""The most memory that this process has held, and how to count it anew."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# For a process that measures. Freed tensors go back to the system at once, whatever their size. By default glibc does
# that with those of more than 32 MiB only: the holes that smaller ones leave are counted, and differ from run to run.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def reset_peak() -> int:
    """The resident bytes now, from which the peak is counted anew."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide growth
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # not Linux: the peak counts from the start of the process, a lower bound
        pass
    return peak()


def peak() -> int:
    """The highest resident bytes since the reset. On Linux not `ru_maxrss`, which begins with the parent's."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        import resource  # not on Windows

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
