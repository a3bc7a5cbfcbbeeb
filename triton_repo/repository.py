"""Writes and reads back a Triton model repository around an engine.

OUTPUT/<model name>/config.pbtxt
OUTPUT/<model name>/1/model.py
OUTPUT/<model name>/1/engine/       the engine directory; large files are hard links where the file system allows
OUTPUT/<model name>/1/tokenizer/    tokenizer.json, chat template, generation settings
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plansmith_errors import EngineError, RepositoryError
from triton_repo.model_config import FILE_NAME as CONFIG_FILE
from triton_repo.model_config import build_model_config, read_model_config, write_model_config
from triton_repo.model_file import FILE_NAME as MODEL_FILE
from triton_repo.model_file import render_model_file
from triton_repo.options import PackageOptions
from triton_repo.tokenizer_check import check_tokenizer

if TYPE_CHECKING:
    from builder import EngineManifest

logger = logging.getLogger(__name__)

VERSION = "1"
MANIFEST = "engine.json"
REQUIRED_TOKENIZER_FILES = ("tokenizer.json", "config.json")
OPTIONAL_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
LINK_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Repository:
    """A checked model repository. Paths are absolute."""

    path: Path
    model_name: str
    plansmith_version: str

    @property
    def version_directory(self) -> Path:
        return self.path / self.model_name / VERSION

    @property
    def engine(self) -> Path:
        return self.version_directory / "engine"

    @property
    def tokenizer(self) -> Path:
        return self.version_directory / "tokenizer"


def write_repository(
    engine: Path, checkpoint: Path, output: Path, options: PackageOptions, *, plansmith_version: str
) -> Path:
    """Package a built engine with the tokenizer of the checkpoint it was built from; returns ``output``.

    ``output`` must be missing or empty. Raises RepositoryError; nothing half-written is left behind.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RepositoryError(f"{output}: already exists and is not an empty directory; choose another output")
    manifest = _engine_manifest(engine)
    files = _engine_files(engine, manifest)
    if options.num_threads is not None and manifest.gpu is not None:
        raise RepositoryError(f"num_threads is {options.num_threads}, but {engine} runs on GPUs; leave num_threads out")
    if checkpoint.is_file():
        raise RepositoryError(
            f"{checkpoint}: expected a directory with {', '.join(REQUIRED_TOKENIZER_FILES)}; quantize it"
        )
    _require(checkpoint, REQUIRED_TOKENIZER_FILES, "give the checkpoint's directory")
    check_tokenizer(checkpoint)
    config = build_model_config(options, plansmith_version)
    output.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=output))
    try:
        partial.chmod(0o755)
        model_file = render_model_file(plansmith_version, manifest.target)
        _fill(partial, [engine / name for name in files], checkpoint, config, model_file)
        partial.rename(output / options.model_name)
    except OSError as error:
        raise RepositoryError(f"{output}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    check_repository(output)
    return output


def check_repository(path: Path) -> Repository:
    """Read a model repository back. Raises RepositoryError when anything in it is missing or damaged."""
    path = path.absolute()
    if not path.is_dir():
        raise RepositoryError(f"{path}: no such directory; expected a model repository written by plansmith package")
    models = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(models) != 1:
        found = f"{len(models)} models ({', '.join(models)})" if models else "no model"
        raise RepositoryError(
            f"{path}: found {found}, expected a repository with one; package into a directory of its own"
        )
    config = read_model_config(path / models[0] / CONFIG_FILE)
    _check_config(config, path / models[0] / CONFIG_FILE, models[0])
    repository = Repository(path, models[0], config.parameters["plansmith_version"].string_value)
    _require(repository.version_directory, (MODEL_FILE,), "package the engine again")
    _engine_files(repository.engine, _engine_manifest(repository.engine))
    _require(repository.tokenizer, REQUIRED_TOKENIZER_FILES, "package the engine again")
    _check_json(repository.tokenizer / "tokenizer.json")
    return repository


def _engine_manifest(engine: Path) -> EngineManifest:
    import builder

    try:
        return builder.read_manifest(engine)
    except EngineError as error:
        raise RepositoryError(str(error)) from None


def _engine_files(engine: Path, manifest: EngineManifest) -> list[str]:
    """Names of an engine's files, its manifest last: that is what makes an engine complete, in the copy too."""
    _require(engine, tuple(manifest.files), "build the engine again")
    return [*sorted(manifest.files), MANIFEST]


def _fill(partial: Path, engine_files: list[Path], checkpoint: Path, config: Any, model_file: str) -> None:
    version = partial / VERSION
    (version / "engine").mkdir(parents=True)
    (version / "tokenizer").mkdir()
    for file in engine_files:
        _link_or_copy(file, version / "engine" / file.name)
    for name in (*REQUIRED_TOKENIZER_FILES, *OPTIONAL_TOKENIZER_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, version / "tokenizer" / name)
    (version / MODEL_FILE).write_text(model_file, encoding="utf-8")
    write_model_config(config, partial / CONFIG_FILE)


def _link_or_copy(source: Path, target: Path) -> None:
    """Artifacts never change, so weights need not exist twice; small files are copied, as people edit them."""
    if source.stat().st_size >= LINK_FROM_BYTES:
        try:
            os.link(source.resolve(), target)
            return
        except OSError as error:
            logger.info("%s: copied, as it cannot be hard-linked: %s", target, error.strerror)
    shutil.copyfile(source, target)


def _require(directory: Path, names: tuple[str, ...], remedy: str) -> None:
    for name in names:
        if not (directory / name).is_file():
            raise RepositoryError(f"{directory / name}: no such file; {remedy}")


def _check_config(config: Any, path: Path, model_name: str) -> None:
    if config.name != model_name:
        raise RepositoryError(f"{path}: name is {config.name!r}, expected {model_name!r} as its directory is called")
    if not config.model_transaction_policy.decoupled or config.max_batch_size != 0:
        raise RepositoryError(f"{path}: expected a decoupled model with max_batch_size 0; package the engine again")
    for name in ("plansmith_version", "max_queue_size"):
        if name not in config.parameters:
            raise RepositoryError(f"{path}: parameter {name!r} is missing; package the engine again")


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RepositoryError(f"{path}: not valid JSON: {error}; package the engine again") from None
