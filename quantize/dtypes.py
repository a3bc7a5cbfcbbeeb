"""The element types of safetensors files and their NumPy types."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "F8_E4M3": FLOAT8_E4M3,
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
SAFETENSORS_TAGS: dict[np.dtype[Any], str] = {dtype: tag for tag, dtype in NUMPY_DTYPES.items()}
SOURCE_FLOATS = ("bfloat16", "float16", "float32", "float64")  # the names of types that can be quantized
