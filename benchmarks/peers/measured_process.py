"""Run a command and say what it cost: wall time, CPU time and peak memory, of it and its children, by os.wait4."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_STARTED = re.compile(rb"^started after ([0-9.]+) CPU seconds", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    wall: float  # seconds, until the output is on the disk
    cpu: float  # seconds, user and system
    startup: float | None  # CPU seconds until the libraries were imported, where the job told them
    peak_bytes: int  # resident; pages of mapped files count
    written: int  # bytes of the output

    def better(self, other: Cost | None) -> Cost:
        """The best of two rounds, each figure by itself."""
        if other is None:
            return self
        startups = [cost.startup for cost in (self, other) if cost.startup is not None]
        return Cost(
            min(self.wall, other.wall),
            min(self.cpu, other.cpu),
            min(startups, default=None),
            min(self.peak_bytes, other.peak_bytes),
            self.written,
        )


class RowError(Exception):
    """Why a row has no figures, in a few words for the table."""


def run_measured(
    command: Sequence[str], source: Path, output: Path, log: Path, environment: Mapping[str, str], limit: float
) -> Cost:
    """Run ``command``, which reads ``source`` from a cold page cache and makes the directory ``output``.

    Its messages go to ``log``. Raises RowError when it takes longer than ``limit`` seconds or fails.
    """
    os.sync()  # the rows before must not be paid by this one
    forget_pages(source)
    start = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
        )
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RowError(f"> {limit:.0f} s" if seconds >= limit else f"failed: logs/{log.name}")
    written = flush(output)
    wall = time.perf_counter() - start
    return Cost(wall, usage.ru_utime + usage.ru_stime, _startup(log), usage.ru_maxrss * 1024, written)


def forget_pages(directory: Path) -> None:
    """Drop the files of ``directory`` from the page cache."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def flush(directory: Path) -> int:
    """Wait until the files of ``directory`` are on the disk; their bytes."""
    total = 0
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            total += os.fstat(descriptor).st_size
            os.close(descriptor)
    return total


def _startup(log: Path) -> float | None:
    found = _STARTED.search(log.read_bytes())
    return float(found[1]) if found else None
