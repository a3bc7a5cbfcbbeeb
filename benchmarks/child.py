"""A contender in a process of its own: it answers JSON lines, and while it waits for one it is stopped.

Stopped (SIGSTOP), its threads cannot spin and so cannot slow the contender whose turn it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent


class Child:
    """Runs ``benchmarks/SCRIPT ARGUMENTS``. Its log, standard error, goes to ``log``. One thread uses it."""

    def __init__(self, log: Path, script: str, *arguments: str) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.ready = self._read()  # what it says first, once it has loaded
        self._process.send_signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one question and wait for its answer. Exits with the place of the log when the child has died."""
        self._process.send_signal(signal.SIGCONT)
        if self._process.stdin is None:
            sys.exit("a child without standard input")
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            self._process.kill()
            sys.exit(f"{' '.join(self._process.args[1:])} has died; see {self._log}")  # type: ignore[index, arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer


def answer_lines(load: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """The child's side: load, say so, then answer every question by ``load()(**question)``."""
    # Libraries print to standard output as they please; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = load()
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
