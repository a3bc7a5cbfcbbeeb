"""One interface over all checkpoints that can be read: Hugging Face names, lazy tensors, float32 rows on demand."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError

GGUF_MAGIC = b"GGUF"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. ``dtype`` is the stored type: a NumPy name ("bfloat16") or a ggml type ("Q4_1")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int  # as stored


class Checkpoint(ABC):
    """A checkpoint opened for reading. Iterating gives a TensorInfo per tensor, in the order of ``names()``."""

    path: Path
    config: dict[str, Any]
    """The content of config.json; of a GGUF file, its metadata converted to one."""
    origin: str
    """What the values are, honestly: "bfloat16 safetensors", "dequantized from Q4_1 and Q8_0 (GGUF)"."""

    @abstractmethod
    def names(self) -> list[str]:
        """Hugging Face names of the tensors."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError when there is no such tensor."""

    @abstractmethod
    def load_dtype(self, name: str) -> np.dtype[Any]:
        """The element type that ``load`` gives."""

    def kept_dtype(self, name: str) -> np.dtype[Any]:
        """The element type of a tensor that is stored as it is."""
        return self.load_dtype(name)

    @abstractmethod
    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows ``begin:end`` of the first axis: how a large tensor is read in bounded memory.

        A read-only view of the mapped file where possible; of a GGUF file, dequantized to float32.
        """

    @abstractmethod
    def source_files(self) -> list[Path]:
        """Every file that the checkpoint was read from."""

    @abstractmethod
    def side_files(self) -> dict[str, bytes]:
        """Tokenizer, generation config, chat template and licenses, by file name; of a GGUF file, converted."""

    def load(self, name: str) -> npt.NDArray[Any]:
        """The whole tensor, as ``load_rows`` gives it."""
        shape = self.info(name).shape
        return self.load_rows(name, 0, shape[0] if shape else 1)

    def load_float32(self, name: str) -> npt.NDArray[np.float32]:
        """The whole tensor in float32."""
        return self.load(name).astype(np.float32, copy=False)

    def release(self, name: str) -> None:  # noqa: B027 - most have nothing to give back
        """The tensor is not needed for now: pages of the mapped file that it took are given back."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja text of the (default) chat template."""
        files = self.side_files()
        if "chat_template.jinja" in files:
            try:
                return files["chat_template.jinja"].decode("utf-8")
            except UnicodeDecodeError:
                raise CheckpointError(f"{self.path}: chat_template.jinja is not UTF-8") from None
        config = parse_json_object(files.get("tokenizer_config.json", b"{}"), f"{self.path}: tokenizer_config.json")
        return _default_template(config.get("chat_template"))

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding matrix."""
        tied = self.config.get("tie_word_embeddings")
        if tied is None:
            return "lm_head.weight" not in self
        if not isinstance(tied, bool):
            raise CheckpointError(f"{self.path}: tie_word_embeddings is {tied!r}, expected true or false")
        return tied

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[TensorInfo]:
        return (self.info(name) for name in self.names())

    def __len__(self) -> int:
        return len(self.names())


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a safetensors directory (a Hugging Face model or one that Plansmith quantized) or a GGUF file.

    Headers are checked against the size of the files before anything is mapped. Raises CheckpointError.
    """
    path = Path(path)
    if path.is_dir():
        from quantize.plain_model import as_plain_model
        from quantize.safetensors_checkpoint import SafetensorsCheckpoint

        return as_plain_model(SafetensorsCheckpoint(path))
    if not path.is_file():
        found = "not a regular file" if path.exists() else "no such file or directory"
        raise CheckpointError(f"{path}: {found}; give a safetensors directory or a GGUF file")
    if path.suffix in _PICKLE_SUFFIXES:
        raise pickle_refused(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: is one file of a checkpoint; give the directory, which holds config.json as well"
        )
    from quantize.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def pickle_refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: is a pickle, which can run code when it is read, and is never opened; "
        "save the model as safetensors (model.save_pretrained(dir, safe_serialization=True)) and give that directory"
    )


def parse_json_object(data: bytes, source: str) -> dict[str, Any]:
    """Parse untrusted JSON that must be an object. Raises CheckpointError naming ``source``."""
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return value


def _default_template(template: Any) -> str | None:
    # Models with several templates list them as {"name", "template"}; "default" is the one for plain chat.
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
