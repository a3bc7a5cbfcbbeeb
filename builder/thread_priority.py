"""Threads that work beside one that is waited for."""

from __future__ import annotations

import os
import sys
import threading

_NICENESS = 10


def run_beside_others() -> None:
    """Let the calling thread have what others leave of the cores; on Linux alone, where a thread has a priority."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
