"""Can a machine load this engine, or make what this build file asks for?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from builder.compatibility import engine_problems
from builder.machine import Machine
from builder.manifest import MANIFEST_NAME
from plansmith.config import load_build_file
from plansmith.source_check import check_source
from plansmith_errors import ConfigError, PlansmithError


@dataclass(frozen=True)
class Diagnosis:
    """Empty ``problems``: it can. The first is the one to mend first."""

    path: str
    question: str
    problems: tuple[str, ...]


def diagnose(path: Path, settings: Sequence[str], machine: Machine | None) -> Diagnosis:
    """``machine`` None: this one. Raises PlansmithError when ``path`` is neither an engine nor a build file."""
    if path.suffix not in (".yaml", ".yml"):
        if not (path / MANIFEST_NAME).is_file():
            raise ConfigError(f"{path}: no engine directory and no .yaml file; name one of them, or nothing")
        return Diagnosis(str(path), "load this engine", tuple(engine_problems(path, machine)))
    if machine is not None:
        raise ConfigError(f"{path}: a build is made on this machine; --machine is for engines")
    return Diagnosis(str(path), "make this build", tuple(_build_problems(path, settings)))


def read_machine(path: Path) -> Machine:
    """The machine in what ``plansmith doctor --output json`` wrote. Raises ConfigError."""
    try:
        return Machine.model_validate(json.loads(path.read_text(encoding="utf-8"))["machine"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, ValidationError):
        raise ConfigError(
            f"{path}: expected what 'plansmith doctor --output json' prints on the other machine"
        ) from None


def _build_problems(path: Path, settings: Sequence[str]) -> list[str]:
    import quantize

    build_file = load_build_file(path, settings)
    try:
        source = quantize.open_checkpoint(build_file.model)
        quantize.load_recipe(build_file.quantize.recipe)
        check_source(source, build_file)
    except PlansmithError as error:
        return [str(error)]
    return []
