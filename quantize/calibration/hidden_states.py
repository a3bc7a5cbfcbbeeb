"""The activations between two layers, in memory or, when they are many, in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class HiddenStates:
    """float32 [num_windows, num_tokens, hidden_size]; each layer replaces them window by window.

    Above ``max_bytes`` they lie in a file without a name in ``directory``, which the system frees even after kill -9.
    """

    def __init__(self, shape: tuple[int, int, int], max_bytes: float, directory: Path) -> None:
        self._file = None
        if int(np.prod(shape)) * 4 > max_bytes:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed on exit
            self.windows: Float32 = np.memmap(self._file, np.float32, "w+", shape=shape)
        else:
            self.windows = np.empty(shape, np.float32)

    @property
    def on_disk(self) -> bool:
        return self._file is not None

    def __enter__(self) -> HiddenStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
