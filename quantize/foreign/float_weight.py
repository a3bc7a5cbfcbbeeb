"""Floats of eight and four bits: fp8 with plain scales, and the block formats NVFP4, MXFP4 and MXFP8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.dtypes import FLOAT8_E4M3
from quantize.e8m0 import E8M0_NAN, decode_e8m0
from quantize.float4 import decode_packed_e2m1
from quantize.float8 import E4M3_VALUES
from quantize.foreign.packed_weight import Float32, Form, PackedWeight, usable
from quantize.foreign.parts import SCALE_FLOATS, Module, Part, Shape
from quantize.weight_rule import BLOCK_SIZES, FP8_BLOCK, Granularity, SchemeName

FP8 = (FLOAT8_E4M3.name,)
DEFAULT_BLOCK = (FP8_BLOCK, FP8_BLOCK)


class Fp8Weight(PackedWeight):
    """e4m3 values [out, in] times scales of the tensor, of rows, or of blocks of ``block``, however they are shaped."""

    def __init__(
        self,
        stored: Part,
        stored_scales: Part,
        granularity: Granularity,
        block: tuple[int, int] = DEFAULT_BLOCK,
        pre_quant_scale: Part | None = None,
    ) -> None:
        super().__init__((stored.shape[0], stored.shape[1]), (stored, stored_scales), pre_quant_scale)
        self._stored = stored
        self._scales = stored_scales
        self._granularity = granularity
        self._block = block

    @property
    def kind(self) -> str:
        return str(Form("fp8", granularity=self._granularity))

    @property
    def form(self) -> Form | None:
        is_held = self._granularity != "block" or self._block == DEFAULT_BLOCK
        return Form("fp8", granularity=self._granularity) if is_held else None

    def values(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._stored.load()[begin:end]

    def scales(self) -> list[npt.NDArray[Any]]:
        scales = self._scales.load_float32()
        if self._granularity == "tensor":
            return [scales.reshape(())]
        return [scales.reshape(num_blocks(self.shape, self._block) if self._granularity == "block" else (-1, 1))]

    def stored_rows(self, begin: int, end: int) -> Float32:
        rows = E4M3_VALUES[self.values(begin, end).view(np.uint8)]
        (scales,) = self.scales()
        if self._granularity == "channel":
            scales = scales[begin:end]
        elif self._granularity == "block":
            height, width = self._block
            scales = scales[np.arange(begin, end) // height]
            scales = np.repeat(scales, min(width, self.shape[1]), axis=1)[:, : self.shape[1]]
        rows *= scales
        return rows


class BlockWeight(PackedWeight):
    """Codes packed along ``in`` (mxfp8: e4m3 values) with a scale for each block of columns.

    nvfp4 has a scale of the tensor as well: ``tensor_scale``, or where ``is_divisor`` its reciprocal.
    """

    def __init__(
        self,
        scheme: SchemeName,
        stored: Part,
        block_scales: Part,
        tensor_scale: Part | None = None,
        *,
        is_divisor: bool = False,
        pre_quant_scale: Part | None = None,
    ) -> None:
        columns = stored.shape[1] * (1 if scheme == "mxfp8" else 2)
        super().__init__((stored.shape[0], columns), (stored, block_scales, tensor_scale), pre_quant_scale)
        self._scheme: SchemeName = scheme
        self._stored = stored
        self._scales = block_scales
        self._tensor_scale = tensor_scale
        self._is_divisor = is_divisor

    @property
    def kind(self) -> str:
        return self._scheme

    @property
    def form(self) -> Form | None:
        return Form(self._scheme)

    def values(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._stored.load()[begin:end]

    def scales(self) -> list[npt.NDArray[Any]]:
        scales = self._scales.load()
        return [scales] if self._tensor_scale is None else [scales, self._factor(self._tensor_scale)]

    def obstacle(self) -> str | None:
        scales = self.scales()
        if self._scheme != "nvfp4" and (scales[0] == E8M0_NAN).any():
            return "some scales are NaN"
        if len(scales) > 1 and not usable(scales[1]):
            return "the scale of the tensor is zero, negative or not finite"
        return super().obstacle()

    def stored_rows(self, begin: int, end: int) -> Float32:
        values = self.values(begin, end)
        decoded = values.astype(np.float32) if self._scheme == "mxfp8" else decode_packed_e2m1(values)
        scales = self._scales.load()[begin:end]
        factors = scales.astype(np.float32) if self._scheme == "nvfp4" else decode_e8m0(scales)
        rows = decoded.reshape(*factors.shape, -1) * factors[..., None]  # exact: few digits times few digits
        if self._tensor_scale is not None:
            rows *= self._factor(self._tensor_scale)
        return np.asarray(rows.reshape(len(values), -1), np.float32)

    def _factor(self, tensor_scale: Part) -> Float32:
        factor = tensor_scale.load_float32().reshape(())
        with np.errstate(divide="ignore"):
            return np.asarray(1 / factor if self._is_divisor else factor, np.float32)


def read_fp8(module: Module, scales: str = "weight_scale", block: tuple[int, int] | None = None) -> Fp8Weight:
    """e4m3 values in ``weight``; what shares a scale is told by the scales' shape. Raises CheckpointError.

    ``block``: what the configuration says of blocks; None: nothing.
    """
    stored = module.part("weight", FP8)
    rows, columns = stored.shape
    vertical, horizontal = num_blocks((rows, columns), block or DEFAULT_BLOCK)
    blocks: dict[Shape, Granularity] = {
        (vertical, 1, horizontal, 1): "block",
        (vertical, horizontal): "block",
    }
    others: dict[Shape, Granularity] = {
        (rows,): "channel",
        (rows, 1): "channel",
        (): "tensor",
        (1,): "tensor",
        (1, 1): "tensor",
    }
    # One scale of a small matrix may be either; the configuration decides.
    shapes = blocks | others if block is None else others | blocks
    part = module.part(scales, SCALE_FLOATS, *shapes)
    pre_quant_scale = module.optional("pre_quant_scale", SCALE_FLOATS, (columns,))
    return Fp8Weight(stored, part, shapes[part.shape], block or DEFAULT_BLOCK, pre_quant_scale)


def read_blocks(
    module: Module, scheme: SchemeName, values: str, tensor_scale: str | None = None, *, is_divisor: bool = False
) -> BlockWeight:
    """``values``: the kind of tensor that holds the codes. Raises CheckpointError."""
    stored = module.part(values, FP8 if scheme == "mxfp8" else ("uint8",))
    rows, columns = stored.shape[0], stored.shape[1] * (1 if scheme == "mxfp8" else 2)
    size = BLOCK_SIZES[scheme]
    if columns % size:
        raise module.refused(f"has {columns} columns, which {scheme}'s blocks of {size} do not divide")
    scales = module.part("weight_scale", FP8 if scheme == "nvfp4" else ("uint8",), (rows, columns // size))
    factor = module.part(tensor_scale, SCALE_FLOATS, (), (1,)) if tensor_scale is not None else None
    pre_quant_scale = module.optional("pre_quant_scale", SCALE_FLOATS, (columns,))
    return BlockWeight(scheme, stored, scales, factor, is_divisor=is_divisor, pre_quant_scale=pre_quant_scale)


def num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks cover a matrix, down and across."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
