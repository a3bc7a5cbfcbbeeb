"""A directory of safetensors files with config.json: a Hugging Face model, or a checkpoint that Plansmith quantized."""

from __future__ import annotations

import difflib
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo, parse_json_object, pickle_refused
from quantize.safetensors_file import SafetensorsFile, StoredTensor

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 256 * 2**20
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")  # of tools that wrote them beside config.json
_SIDE_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


class SafetensorsCheckpoint(Checkpoint):
    """Files are mapped, not read; ``load`` gives views of the maps. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = self._find_files()
        self.config = read_json(path / "config.json")
        self._files = [SafetensorsFile(file) for file in files]
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is in both {self._file_of[name].path.name} and {file.path.name}"
                    )
                self._file_of[name] = file
        self._check_index()
        self.origin = self._describe()

    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def info(self, name: str) -> TensorInfo:
        tensor = self._stored(name)
        return TensorInfo(name, tensor.dtype.name, tensor.shape, tensor.end - tensor.begin)

    def load_dtype(self, name: str) -> np.dtype[Any]:
        return self._stored(name).dtype

    def load_rows(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        tensor = self._stored(name)
        view = self._file_of[name].view(name)
        return view[begin:end] if tensor.shape else view

    def release(self, name: str) -> None:
        self._stored(name)
        self._file_of[name].release(name)

    def source_files(self) -> list[Path]:
        index = [self.path / INDEX_NAME] if self._index is not None else []
        weights = [file.path for file in self._files]
        configs = [path for name in _QUANTIZATION_FILES if (path := self.path / name).is_file()]
        sides = [self.path / name for name in self._side_names]
        return [self.path / "config.json", *configs, *index, *weights, *sides]

    def side_files(self) -> dict[str, bytes]:
        return {name: _read_small(self.path / name) for name in self._side_names}

    @cached_property
    def _side_names(self) -> list[str]:
        found = (entry.name for entry in self.path.iterdir() if entry.is_file())
        return sorted(name for name in found if any(fnmatch(name, pattern) for pattern in _SIDE_PATTERNS))

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name, of model.safetensors.index.json."""
        path = self.path / INDEX_NAME
        if not path.exists():
            return None
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: expected a weight_map from tensor names to file names")
        for name, file in weight_map.items():
            # A name with a directory in it could lead out of the checkpoint.
            if (
                not isinstance(file, str)
                or Path(file).name != file
                or "\\" in file
                or not file.endswith(".safetensors")
            ):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is said to be in {file!r}; expected a .safetensors file beside it"
                )
        return weight_map

    def _find_files(self) -> list[Path]:
        if self._index is not None:
            files = [self.path / name for name in sorted(set(self._index.values()))]
        else:
            files = sorted(self.path.glob("*.safetensors"))
            if len(files) > 1:
                # consolidated.safetensors and the like repeat the weights under other names.
                files = [file for file in files if file.name == "model.safetensors"]
                if not files:
                    raise CheckpointError(
                        f"{self.path}: has several safetensors files but no {INDEX_NAME}, which names theirs"
                    )
        missing = [file.name for file in files if not file.is_file()]
        if missing and self._index is None:
            raise CheckpointError(f"{self.path / missing[0]}: is a link to nothing or no regular file; get it again")
        if missing:
            raise CheckpointError(f"{self.path}: {INDEX_NAME} names {missing[0]}, which is missing; download it again")
        if not files:
            raise self._nothing_to_read()
        return files

    def _nothing_to_read(self) -> CheckpointError:
        pickles = sorted([*self.path.glob("pytorch_model*.bin"), *self.path.glob("*.pt"), *self.path.glob("*.pth")])
        if pickles:
            return pickle_refused(pickles[0])
        ggufs = sorted(self.path.glob("*.gguf"))
        advice = (
            f"give the file itself: {ggufs[0]}" if ggufs else "give a directory with model.safetensors and config.json"
        )
        return CheckpointError(f"{self.path}: holds no safetensors file; {advice}")

    def _check_index(self) -> None:
        for name, file in (self._index or {}).items():
            if name not in self._file_of:
                raise CheckpointError(f"{self.path / file}: tensor {name!r} is missing; {INDEX_NAME} says it is there")

    def _stored(self, name: str) -> StoredTensor:
        file = self._file_of.get(name)
        if file is None:
            near = difflib.get_close_matches(name, self._file_of, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise CheckpointError(f"{self.path}: has no tensor {name!r} (it has {len(self)} others){hint}")
        return file.tensors[name]

    def _describe(self) -> str:
        method = self.config.get("quantization_config")
        if isinstance(method, dict):
            return f"quantized safetensors ({method.get('quant_method', 'unknown method')})"
        sizes: dict[str, int] = {}
        for tensor in self:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        return f"{max(sizes, key=lambda dtype: sizes[dtype]) if sizes else 'empty'} safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint has {path.name} beside its safetensors files")
    return parse_json_object(_read_small(path), str(path))


def _read_small(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: has {size} bytes; at most {MAX_JSON_BYTES} are read for a file of this kind")
    return path.read_bytes()
