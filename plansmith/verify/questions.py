"""Multiple-choice questions in PIQA's format: JSON lines of {goal, sol1, sol2}, and a file of labels."""

from __future__ import annotations

import json
from pathlib import Path

from builder import Question
from plansmith.config import ChoicesCheck
from plansmith_errors import ConfigError

_KEYS = ("goal", "sol1", "sol2")


def read_questions(check: ChoicesCheck) -> list[Question]:
    """The questions with their answers, in the prompt of lm-evaluation-harness's piqa task. Raises ConfigError."""
    questions_key, labels_key = "verify.choices.questions", "verify.choices.labels"
    rows = [line for line in enumerate(_lines(check.questions, questions_key), 1) if line[1].strip()]
    labels = [line for line in enumerate(_lines(check.labels, labels_key), 1) if line[1].strip()]
    if not rows:
        raise ConfigError(f"{questions_key}: {check.questions} has no question; expected a JSON object on every line")
    if len(rows) != len(labels):
        raise ConfigError(
            f"{labels_key}: {check.labels} has {len(labels)} labels for the {len(rows)} questions of "
            f"{check.questions}; expected one per line"
        )
    questions = []
    for (row, text), (label_row, label) in zip(rows, labels, strict=True):
        goal, *solutions = _parse(text, f"{questions_key}: {check.questions} line {row}")
        answer = _label(label.strip(), f"{labels_key}: {check.labels} line {label_row}")
        questions.append(Question(f"Question: {goal}\nAnswer:", tuple(solutions), answer))
    return questions


def read_utf8(path: Path, key: str) -> str:
    """A text file that the build file's ``key`` names. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8; expected a plain text") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}; name a plain text") from None


def _lines(path: Path, key: str) -> list[str]:
    return read_utf8(path, key).split("\n")  # not splitlines: JSON strings may hold U+2028 and the like


def _parse(line: str, where: str) -> list[str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not valid JSON; expected an object with {', '.join(_KEYS)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: found {_short(value)}; expected an object with {', '.join(_KEYS)}")
    texts = []
    for key in _KEYS:
        text = value.get(key)
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: {key!r} is {_short(text)}; expected a text")
        texts.append(text)
    return texts


def _label(text: str, where: str) -> int:
    if text not in ("0", "1"):
        raise ConfigError(f"{where}: the label is {_short(text)}; expected 0 (sol1 is right) or 1 (sol2 is)")
    return int(text)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
