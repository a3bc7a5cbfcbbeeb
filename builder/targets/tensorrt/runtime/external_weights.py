"""A rank's external weights, as bytes: what lies in the file is what the plan's inputs are bound to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError, EngineError


def read_weights(file: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and bytes of each tensor of a safetensors file, which is mapped. Raises EngineError."""
    from quantize.safetensors_file import SafetensorsFile

    try:
        source = SafetensorsFile(file)
    except CheckpointError as error:
        raise EngineError(str(error)) from None
    for name in source.tensors:
        yield name, source.view(name).reshape(-1).view(np.uint8)
        source.release(name)
