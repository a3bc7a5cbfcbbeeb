"""The INT4 weights that llmcompressor and nvidia-modelopt write, back to floats, so that one code scores all of them.

compressed-tensors "pack-quantized": X.weight_packed int32 [out, in / 8], eight values of q + 8 in each, the first in
the low bits; X.weight_scale [out, in / group]. ModelOpt "W4A16_AWQ": X.weight uint8 [out / 2, in], rows 2 i in the low
and 2 i + 1 in the high four bits, two's complement; X.weight_scale [out, in / group]; X.pre_quant_scale [in], by which
the input is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
_PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".pre_quant_scale")


def decode_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, Float32]]:
    """Every weight of a checkpoint under its own name, float32. Raises ValueError for a form not described above."""
    for name, stored in tensors.items():
        module = name.rpartition(".")[0]
        if name.endswith(".weight_packed"):
            yield f"{module}.weight", _decoded(unpack_int32(stored), module, tensors)
        elif name.endswith(".weight") and stored.dtype == np.uint8:
            yield name, _decoded(unpack_row_pairs(stored), module, tensors)
        elif name.endswith(_PARTS):
            continue
        elif stored.dtype.kind in "iub" or name.endswith((".weight_zero_point", ".weight_g_idx")):
            raise ValueError(f"{name}: {stored.dtype} is no part of the formats that this benchmark decodes")
        else:
            yield name, stored.astype(np.float32)


def unpack_int32(packed: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
    """[out, in / 8] to [out, in], -8 to 7."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (packed.view(np.uint32)[..., None] >> shifts) & 15
    return nibbles.reshape(len(packed), -1).astype(np.int8) - np.int8(8)


def unpack_row_pairs(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """[out / 2, in] to [out, in], -8 to 7."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1]).astype(np.int8)
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)


def _decoded(values: npt.NDArray[np.int8], module: str, tensors: Mapping[str, npt.NDArray[Any]]) -> Float32:
    scales = tensors[f"{module}.weight_scale"].astype(np.float32)
    if values.shape[1] % scales.shape[1]:
        raise ValueError(f"{module}: {scales.shape[1]} scales do not divide {values.shape[1]} columns")
    weight = values * np.repeat(scales, values.shape[1] // scales.shape[1], axis=1)
    factors = tensors.get(f"{module}.pre_quant_scale")
    return weight if factors is None else weight * factors.astype(np.float32)
