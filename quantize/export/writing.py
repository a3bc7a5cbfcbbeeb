"""Tensors into safetensors files: each is built when its turn comes, and let go once it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.safetensors_checkpoint import INDEX_NAME
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

Step = Callable[[str], None]
"""Called with the name of each tensor that is written."""


@dataclass(frozen=True)
class PlannedTensors:
    """Tensors that are made together: a weight and its scales. ``build`` gives an array per spec."""

    specs: tuple[TensorSpec, ...]
    build: Callable[[], Sequence[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def write_file(path: Path, planned: Sequence[PlannedTensors], step: Step) -> None:
    """Raises OSError when the disk refuses."""
    specs = [spec for tensors in planned for spec in tensors.specs]
    with SafetensorsWriter(path, specs, metadata_format="pt") as writer:
        for tensors in planned:
            for spec, array in zip(tensors.specs, tensors.build(), strict=True):
                if array.shape != spec.shape or array.dtype != spec.dtype:
                    raise RuntimeError(f"{spec} was built as {array.dtype} {array.shape}")  # a mistake of ours
                writer.add(spec).write_rows(0, np.atleast_1d(array))
                step(spec.name)


def write_model(output: Path, planned: Sequence[PlannedTensors], max_shard_bytes: int, step: Step) -> None:
    """model.safetensors, or shards with their index as Hugging Face names them."""
    shards = _split(planned, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(output / name, shard, step)
        weight_map |= {spec.name: name for tensors in shard for spec in tensors.specs}
    if len(shards) > 1:
        total = sum(tensors.nbytes for tensors in planned)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (output / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(planned: Sequence[PlannedTensors], max_shard_bytes: int) -> list[list[PlannedTensors]]:
    shards: list[list[PlannedTensors]] = [[]]
    size = 0
    for tensors in planned:
        if shards[-1] and size + tensors.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensors)
        size += tensors.nbytes
    return shards
