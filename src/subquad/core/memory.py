"""Sizes in bytes, read and written (4GiB, 512MiB, 2.5GB), and the most memory that this process has held."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(text: str, name: str) -> int:
    """`4GiB`, `512 MiB`, `2.5GB` or a number of bytes; `name` is that of the argument, for the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    size = int(float(match[1]) * units[match[2].lower()]) if match and match[2].lower() in units else 0
    if size < 1:
        raise ValueError(f"{name} must be a size such as 4GiB or 512MiB, not {text!r}")
    return size


def show_bytes(size: float) -> str:
    """In the largest unit that leaves at least 1."""
    for unit, factor in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} B"


def physical_memory() -> int | None:
    """Bytes of memory that this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


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
