"""A checkpoint seen under other names or in other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quantize.checkpoint import Checkpoint


class CheckpointView(Checkpoint):
    """Everything as in ``source``; those that change tensors say how. ``_stored_name``: where a tensor lies there."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self.path = source.path
        self.config: dict[str, Any] = source.config
        self.origin = source.origin

    def load_dtype(self, name: str) -> np.dtype[Any]:
        return self._source.load_dtype(self._stored_name(name))

    def kept_dtype(self, name: str) -> np.dtype[Any]:
        return self._source.kept_dtype(self._stored_name(name))

    def release(self, name: str) -> None:
        self._source.release(self._stored_name(name))

    def source_files(self) -> list[Path]:
        return self._source.source_files()

    def side_files(self) -> dict[str, bytes]:
        return self._source.side_files()

    def _stored_name(self, name: str) -> str:
        return name
