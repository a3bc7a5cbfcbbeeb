"""``engine.json``: what an engine directory holds, what it was made from and what it needs. Written last."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from builder.file_hashes import file_sha256
from builder.gpu_manifest import GpuEngine
from builder.manifest_part import ManifestPart
from plansmith_errors import EngineError

MANIFEST_NAME = "engine.json"
FORMAT_VERSION: Literal[1] = 1
_HASH_THREADS = 4


class FileEntry(ManifestPart):
    bytes: int = Field(ge=0)
    sha256: str


class Limits(ManifestPart):
    """What the engine was compiled for; the number of KV blocks is chosen when it is loaded."""

    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    vocab_size: int = Field(ge=1)


class KvCache(ManifestPart):
    dtype: str
    tokens_per_block: int = Field(ge=1)
    bytes_per_block: int = Field(ge=1)
    """Keys and values of all layers, on the machine that built the engine; of the rank with most on GPU targets."""


class Source(ManifestPart):
    """The checkpoint that was compiled."""

    files: dict[str, str]  # name -> SHA-256
    quantization: dict[str, Any] | None  # its config's "quantization_config": recipe, provenance, schemes


class EngineManifest(ManifestPart):
    """See docs/engine-format.md."""

    format_version: Literal[1] = FORMAT_VERSION
    plansmith_version: str
    target: str
    library: dict[str, str]  # exact versions that the engine needs
    precision: Literal["fast", "exact"] | None  # of the cpu target
    compile_properties: dict[str, str]
    limits: Limits
    kv_cache: KvCache
    model: dict[str, Any]  # the Hugging Face config without its quantization
    weights: dict[str, str]  # changes that the target made to weights, by scheme
    source: Source
    files: dict[str, FileEntry]
    gpu: GpuEngine | None = None  # of GPU targets

    def as_data(self) -> dict[str, Any]:
        """As it stands in ``engine.json``; without ``gpu`` for the cpu target."""
        return self.model_dump(mode="json", exclude=self._left_out())

    def as_json(self) -> str:
        return self.model_dump_json(indent=2, exclude=self._left_out())

    def _left_out(self) -> set[str] | None:
        return {"gpu"} if self.gpu is None else None


def read_manifest(path: Path) -> EngineManifest:
    """Read the manifest of the engine directory ``path``. Raises EngineError."""
    file = path / MANIFEST_NAME
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"{path}: no {MANIFEST_NAME} found; expected an engine directory made by a build") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{file}: cannot be read as JSON ({error}); build the engine again") from None
    found = data.get("format_version") if isinstance(data, dict) else None
    if found != FORMAT_VERSION:
        raise EngineError(f"{file}: format_version is {found!r}, expected {FORMAT_VERSION}; build the engine again")
    try:
        return EngineManifest.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineError(f"{file}: {where}: {first['msg'].lower()}; build the engine again") from None


def write_manifest(path: Path, manifest: EngineManifest) -> None:
    (path / MANIFEST_NAME).write_text(manifest.as_json() + "\n", encoding="utf-8")


def check_files(
    path: Path, manifest: EngineManifest, *, required: Iterable[str], hash_below: int | None = None
) -> None:
    """Compare the size of every file with the manifest, then the content of those smaller than ``hash_below`` bytes.

    None reads all of them. Raises EngineError.
    """
    for name in required:
        if name not in manifest.files:
            raise EngineError(f"{path}: {MANIFEST_NAME} does not name {name}; build the engine again")
    for name, entry in manifest.files.items():
        _check_size(path, name, entry)
    hashed = {name: entry for name, entry in manifest.files.items() if hash_below is None or entry.bytes < hash_below}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashing releases the GIL
        digests = pool.map(lambda name: file_sha256(path / name), hashed)
        for (name, entry), digest in zip(hashed.items(), digests, strict=True):
            if digest != entry.sha256:
                raise EngineError(
                    f"{path / name}: content is not what {MANIFEST_NAME} says (SHA-256); build the engine again"
                )


def _check_size(path: Path, name: str, entry: FileEntry) -> None:
    file = path / name
    if Path(name).name != name or not file.is_file():
        raise EngineError(f"{path}: {name} is missing, but {MANIFEST_NAME} names it; build the engine again")
    size = file.stat().st_size
    if size != entry.bytes:
        raise EngineError(f"{file}: {size} bytes found, {entry.bytes} expected; build the engine again")


def describe_file(path: Path) -> FileEntry:
    return FileEntry(bytes=path.stat().st_size, sha256=file_sha256(path))
