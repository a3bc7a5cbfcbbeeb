"""All that a user sees. Results go to stdout; messages, progress and warnings to stderr. Nothing else prints."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from plansmith.options import GlobalOptions, current_options

Progress = Callable[[int, int, str], None]

_PLAIN_SECONDS = 2.0  # without a terminal a progress line is worth its place in a log only now and then


class Console:
    """Speaks to the user in the manner that the global options ask for."""

    def __init__(self, options: GlobalOptions) -> None:
        self.options = options
        level = {-1: logging.WARNING, 0: logging.WARNING, 1: logging.INFO}[options.verbosity]
        logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)

    @classmethod
    def current(cls) -> Console:
        return cls(current_options())

    def info(self, message: str) -> None:
        if self.options.verbosity >= 0:
            sys.stderr.write(f"{message}\n")

    def detail(self, message: str) -> None:
        if self.options.verbosity >= 1:
            sys.stderr.write(f"{message}\n")

    def warning(self, message: str) -> None:
        sys.stderr.write(f"warning: {message}\n")

    def result(self, data: Any, text: str | None = None) -> None:
        """Print a verb's result: ``data`` as JSON, or ``text`` for a reader."""
        if self.options.output == "json":
            sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        elif text is not None:
            sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()

    def resuming(self, num_finished: int, num_tensors: int) -> None:
        """A run that was stopped goes on."""
        self.info(f"resuming: {num_finished} of {num_tensors} tensors were finished")

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress]:
        """A progress bar on a terminal, plain lines elsewhere. Yields ``report(done, total, label)``."""
        if self.options.verbosity < 0:
            yield lambda done, total, label: None
        elif sys.stderr.isatty():
            with self._bar(title) as report:
                yield report
        else:
            yield self._plain_progress(title)

    @contextmanager
    def _bar(self, title: str) -> Iterator[Progress]:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[label]}"),
        )
        with RichProgress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None, label="")
            yield lambda done, total, label: bar.update(task, completed=done, total=total, label=label)

    def _plain_progress(self, title: str) -> Progress:
        last = time.monotonic()

        def report(done: int, total: int, label: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _PLAIN_SECONDS:
                last = time.monotonic()
                self.info(f"{title}: {done}/{total} {label}")

        return report


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: bool = True) -> str:
    """A plain aligned table: first column to the left, the others to the right where they are ``numbers``."""
    cells = [list(headers)] + [[str(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "  ".join(
            value.ljust(width) if column == 0 or not numbers else value.rjust(width)
            for column, (value, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def human_bytes(count: float) -> str:
    """Bytes for a reader, in powers of 1000 as disks and safetensors files are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
