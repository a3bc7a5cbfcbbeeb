"""The process that builds one rank. Standard input: the job; standard output: events, a line of JSON each."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from plansmith_errors import PlansmithError

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Run the job; the last event is a "result" or an "error"."""
    _die_with_parent()
    events = _claim_stdout()
    job = json.load(sys.stdin)

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    logging.basicConfig(level=job["log_level"], handlers=[_Forward(tell)])
    started = time.monotonic()
    try:
        report = _call(job, lambda done, total, name: tell(weight=[done, total, name]))
        tell(result=report, seconds=time.monotonic() - started, peak=peak_rss_bytes())
    except PlansmithError as error:
        tell(error=" ".join(str(error).split()), kind="refused")
    except MemoryError:
        tell(error="ran out of memory", kind="killed")
    except Exception:
        tell(error=traceback.format_exc(), kind="bug")


def peak_rss_bytes() -> int | None:
    """Of this process since it was started; getrusage would count what its parent had in memory before."""
    found = proc_status_bytes("self", "VmHWM")
    if found is not None or sys.platform == "win32":
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def proc_status_bytes(pid: int | str, field: str) -> int | None:
    """A size of /proc/PID/status; None where there is no such process or system."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines if line.startswith(field + ":"))
    return next((int(words[1]) * 1024 for words in sizes), None)


def _call(job: dict[str, Any], on_weight: Any) -> Any:
    module, _, name = job["function"].partition(":")
    return getattr(import_module(module), name)(job["arguments"], Path(job["output"]), on_weight)


def _claim_stdout() -> TextIO:
    """Standard output for events alone: what libraries print goes to standard error."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return events


def _die_with_parent() -> None:
    """However the parent ends, also by SIGKILL. Systems other than Linux have only the parent's own clean-up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Forward(logging.Handler):
    """Log records become events, for the parent to log."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(log=[record.levelno, record.name, record.getMessage()])
