"""Calibration text: a plain UTF-8 file, JSON lines, or the text that ships with Plansmith."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plansmith_errors import QuantizeError

DEFAULT_TEXT = Path(__file__).parent / "default.txt"

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Chat turns {"role", "content"} to the prompt that the model was trained on."""


def calibration_file(text: Path | None) -> Path:
    """The file that is read for a recipe's ``calibration.text``."""
    return DEFAULT_TEXT if text is None else text


def text_sha256(path: Path) -> str:
    """SHA-256 of a calibration file, hexadecimal. Raises QuantizeError."""
    return hashlib.sha256(_read(path)).hexdigest()


def read_documents(path: Path, render: Render | None) -> list[str]:
    """The documents of a file: one of a plain text, one a line of ``.jsonl``. Raises QuantizeError."""
    try:
        text = _read(path).decode("utf-8")
    except UnicodeDecodeError:
        raise QuantizeError(f"calibration text {path}: is not UTF-8; give a plain text or .jsonl") from None
    if path.suffix != ".jsonl":
        return [text]
    lines = enumerate(text.split("\n"), 1)
    return [
        _document(line, f"calibration text {path}, line {number}", render) for number, line in lines if line.strip()
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuantizeError(
            f"calibration text {path}: {error.strerror or error}; name a plain text or .jsonl"
        ) from None


def _document(line: str, where: str, render: Render | None) -> str:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QuantizeError(f"{where}: not valid JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("text"), str):
        return str(data["text"])
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(turn, dict) for turn in messages):
        raise QuantizeError(f'{where}: expected {{"text": "..."}} or {{"messages": [{{"role", "content"}}, ...]}}')
    if render is None:
        raise QuantizeError(f"{where}: holds chat turns, and nothing here renders them; give plain text")
    return render(messages)
