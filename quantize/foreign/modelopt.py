"""ModelOpt's Hugging Face layout: FP8, FP8 per channel, fp8_pb_wo, W4A16_AWQ, W4A8_AWQ, W8A8_SQ, NVFP4, MXFP4/8, mixed.

https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export. INT4 is packed along the outputs, the low nibble being
the even row, in two's complement. W4A8's weight_scale_2 scales the activations' product and is no part of W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.foreign.bits import UInt8
from quantize.foreign.float_weight import read_blocks, read_fp8
from quantize.foreign.integer_weight import IntegerWeight
from quantize.foreign.layout import Layout, shorten
from quantize.foreign.packed_weight import PackedWeight
from quantize.foreign.parts import SCALE_FLOATS, Module, Part
from quantize.foreign.rows_of_integers import RowsOfIntegers

_KINDS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PB_REAL": "fp8",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "INT4_AWQ": "int4",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A8_SQ": "int8",
    "W8A16": "int8",
    "INT8": "int8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "MXFP8": "mxfp8",
    "MIXED_PRECISION": None,
}


class ModelOptLayout(Layout):
    name = "ModelOpt"

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        quantization = config.get("quantization", config)
        algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
        if not isinstance(algorithm, str) or algorithm.upper() not in _KINDS:
            raise CheckpointError(
                f"{source}: quant_algo is {shorten(algorithm)}, expected one of {', '.join(_KINDS)}; "
                "quantize the original model"
            )
        self._algorithm = algorithm.upper()

    def weight(self, module: Module) -> PackedWeight | None:
        if "weight_scale" not in module:
            return None
        kind = _kind(module)
        expected = _KINDS[self._algorithm]
        if expected not in (None, kind):
            raise module.refused(f"is stored as {kind}, but quant_algo is {self._algorithm}; get the checkpoint again")
        if kind == "fp8":
            return read_fp8(module)
        if kind == "nvfp4":
            return read_blocks(module, "nvfp4", "weight", "weight_scale_2")
        if kind in ("mxfp4", "mxfp8"):
            return read_blocks(module, "mxfp8" if kind == "mxfp8" else "mxfp4", "weight")
        return _read_int8(module) if kind == "int8" else _read_int4(module)


def _kind(module: Module) -> str:
    values, scales = module.dtype("weight"), module.dtype("weight_scale")
    if values == "int8":
        return "int8"
    if values == "uint8":
        return {"float8_e4m3fn": "nvfp4", "uint8": "mxfp4"}.get(scales, "int4")
    return "mxfp8" if scales == "uint8" else "fp8"


def _read_int8(module: Module) -> PackedWeight:
    stored = module.part("weight", ("int8",))
    rows, columns = stored.shape
    scales = module.part("weight_scale", SCALE_FLOATS, (rows,), (rows, 1), (), (1,))
    pre_quant_scale = module.optional("pre_quant_scale", SCALE_FLOATS, (columns,))
    return RowsOfIntegers((rows, columns), stored, scales, bits=8, group_size=columns, pre_quant_scale=pre_quant_scale)


def _read_int4(module: Module) -> PackedWeight:
    stored = module.part("weight", ("uint8",))
    rows, columns = stored.shape[0] * 2, stored.shape[1]
    scales = module.part("weight_scale", SCALE_FLOATS)
    groups = scales.shape[1]
    if scales.shape[0] != rows or columns % groups:
        raise module.refused(
            f"has weight_scale {list(scales.shape)} for {rows} rows of {columns} columns; get the checkpoint again"
        )
    unused = module.optional("weight_scale_2", SCALE_FLOATS, (), (1,))
    pre_quant_scale = module.optional("pre_quant_scale", SCALE_FLOATS, (columns,))
    return _PairsOfRows((rows, columns), stored, scales, unused, pre_quant_scale)


class _PairsOfRows(IntegerWeight):
    def __init__(
        self, shape: tuple[int, int], stored: Part, scales: Part, unused: Part | None, pre_quant_scale: Part | None
    ) -> None:
        super().__init__(
            shape,
            (stored, scales, unused),
            bits=4,
            group_size=shape[1] // scales.shape[1],
            has_zeros=False,
            pre_quant_scale=pre_quant_scale,
        )
        self._stored = stored
        self._scales = scales

    def unsigned(self, begin: int, end: int) -> UInt8:
        first = begin // 2
        pairs = self._stored.load()[first : -(-end // 2)]
        rows = np.empty((2 * len(pairs), self.shape[1]), np.uint8)
        np.bitwise_and(pairs, 0x0F, out=rows[0::2])
        np.right_shift(pairs, 4, out=rows[1::2])
        return rows[begin - 2 * first : end - 2 * first] ^ np.uint8(8)

    def group_scales(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._scales.load()[begin:end]

    def group_zeros(self, begin: int, end: int) -> UInt8:
        return np.full((end - begin, self._scales.shape[1]), 8, np.uint8)
