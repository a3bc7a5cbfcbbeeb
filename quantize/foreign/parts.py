"""What one module of a quantized checkpoint is stored as: its tensors by kind, checked by their headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.checkpoint import Checkpoint, TensorInfo

SCALE_FLOATS = ("float32", "float16", "bfloat16")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One stored tensor, not read yet."""

    checkpoint: Checkpoint
    info: TensorInfo

    @property
    def shape(self) -> Shape:
        return self.info.shape

    def load(self) -> npt.NDArray[Any]:
        """A read-only view of the mapped file."""
        return self.checkpoint.load(self.info.name)

    def load_float32(self) -> npt.NDArray[np.float32]:
        return self.checkpoint.load_float32(self.info.name)


class Module:
    """The tensors "name.kind". ``part`` raises CheckpointError for one that is missing or does not fit."""

    def __init__(self, checkpoint: Checkpoint, name: str, kinds: Iterable[str]) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self._kinds = frozenset(kinds)

    def __contains__(self, kind: object) -> bool:
        return kind in self._kinds

    def dtype(self, kind: str) -> str:
        """The stored type's name."""
        return self._info(kind).dtype

    def shape(self, kind: str) -> Shape:
        return self._info(kind).shape

    def part(self, kind: str, dtypes: tuple[str, ...], *shapes: Shape) -> Part:
        """``shapes``: those that are accepted; any of two dimensions when none is given."""
        info = self._info(kind)
        fits = info.shape in shapes if shapes else len(info.shape) == 2 and 0 not in info.shape
        if info.dtype not in dtypes or not fits:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes)) or "of two dimensions"
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {info.name!r} is {info.dtype} {list(info.shape)}, "
                f"expected {' or '.join(dtypes)} {expected}; get the checkpoint again"
            )
        return Part(self.checkpoint, info)

    def optional(self, kind: str, dtypes: tuple[str, ...], *shapes: Shape) -> Part | None:
        return self.part(kind, dtypes, *shapes) if kind in self else None

    def refused(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.path}: {self.name!r} {problem}")

    def _info(self, kind: str) -> TensorInfo:
        if kind not in self:
            raise self.refused(f"has {', '.join(sorted(self._kinds))} but no {kind}; get the checkpoint again")
        return self.checkpoint.info(f"{self.name}.{kind}")
