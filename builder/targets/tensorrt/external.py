"""External weights: the file that a rank's plan is given at run time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.payload import FOUR_BITS, Payload, numpy_type
from plansmith_errors import BuildError


def write_weights(path: Path, external: Mapping[str, Payload]) -> None:
    """A safetensors file of the bytes that the plan's inputs are bound to, by the inputs' names.

    int4 and fp4 are U8 with two values in a byte, e8m0 is U8. Raises BuildError where it cannot be written.
    """
    from quantize.safetensors_writer import SafetensorsWriter, TensorSpec

    specs = {name: TensorSpec(name, *stored_as(payload)) for name, payload in external.items()}
    try:
        with SafetensorsWriter(path, list(specs.values())) as writer:
            for name, spec in specs.items():
                slot = writer.add(spec)
                slot.write_rows(0, stored(external[name]))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise BuildError(f"{path}: cannot be written: {error.strerror}; is there room on the disk?") from None


def stored(payload: Payload) -> npt.NDArray[Any]:
    """The payload's own memory as an array of the type and shape that the file says."""
    dtype, shape = stored_as(payload)
    return payload.array.view(dtype).reshape(shape)


def stored_as(payload: Payload) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The type and shape that the file says."""
    import ml_dtypes

    shape = payload.shape
    if payload.dtype in FOUR_BITS:
        shape = (*shape[:-1], shape[-1] // 2)
    own: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}
    return np.dtype(own.get(payload.dtype, numpy_type(payload.dtype))), shape
