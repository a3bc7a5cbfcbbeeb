"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes


def trim_freed_memory() -> None:
    """Give it back to the system now: glibc keeps blocks of up to 32 MB for each thread. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
