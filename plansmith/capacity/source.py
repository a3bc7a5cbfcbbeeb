"""What ``plansmith plan`` is given: a build file, a checkpoint or a bare config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plansmith.config import BuildFile, load_build_file
from plansmith.standalone import section_settings
from plansmith_errors import CheckpointError
from quantize.safetensors_checkpoint import read_json


@dataclass(frozen=True)
class Source:
    """``build_file`` holds defaults and settings where no file was given."""

    config: dict[str, Any]
    where: str  # names the config in errors
    build_file: BuildFile
    is_build_file: bool


def read_source(path: Path, settings: Sequence[str]) -> Source:
    """Reads nothing but configs: weights need not be there. Raises ConfigError and CheckpointError."""
    if path.suffix in (".yaml", ".yml"):
        build_file = load_build_file(path, settings)
        config, where = _read_config(build_file.model)
        return Source(config, where, build_file, is_build_file=True)
    config, where = _read_config(path)
    return Source(config, where, section_settings(settings, "build"), is_build_file=False)


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return read_json(path), str(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or directory; give a build file, a checkpoint or a config.json")
    from quantize import open_checkpoint

    return open_checkpoint(path).config, str(path)
