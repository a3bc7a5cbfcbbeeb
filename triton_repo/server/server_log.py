"""Reads the one line that matters out of a Triton server's log."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 1 << 20
# a glog prefix such as: E1130 22:10:17.123456 1234 model_lifecycle.cc:642]
_PREFIX = re.compile(r"^[EWIF]\d{4} [\d:.]+ \d+ [\w.]+:\d+\]\s*")
_LOAD_ERROR = re.compile(r"failed to load '[^']*' version \d+: \w+(?: \w+)?: (.*)")
# glog quotes messages and escapes their line ends; the stub adds its Python frames
_FRAMES = re.compile(r"(\\n)+At:.*|\"$")
_EXCEPTION_NAME = re.compile(r"^\w+(Error|Exception): ")
_PYTHON_FRAME = re.compile(r"^\s*(At:$|/.*\(\d+\): |$)")


def failure_line(log: Path) -> str:
    """Why the server did not come up: the model's load error if there is one, else the last error or line."""
    lines = _tail(log)
    for line in reversed(lines):
        if match := _LOAD_ERROR.search(line):
            return _EXCEPTION_NAME.sub("", _FRAMES.sub("", match.group(1)).strip())
    errors = [line for line in lines if re.match(r"^(E\d{4} |error: )", line)]
    for line in reversed(errors or lines):
        if not _PYTHON_FRAME.match(line):
            return _PREFIX.sub("", line).strip()
    return "the server wrote nothing to its log"


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
