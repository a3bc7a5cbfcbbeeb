"""GPTQ files (AutoGPTQ, GPTQModel): qweight int32 [in * bits / 32, out], scales [groups, out], qzeros, g_idx [in].

https://github.com/ModelCloud/GPTQModel, nn_modules/qlinear: values are packed along the inputs, lowest bits first.
Files of the first format hold every zero point less one; ``checkpoint_format: gptq_v2`` holds it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.foreign.bits import UInt8, num_words, unpack_bits
from quantize.foreign.group_index import group_index
from quantize.foreign.integer_weight import IntegerWeight
from quantize.foreign.layout import Layout
from quantize.foreign.parts import SCALE_FLOATS, Module, Part

_FORMATS = {None: True, "gptq": True, "gptq_v2": False}  # whether zero points are stored less one
_BITS = (2, 3, 4, 8)
# Writers take one from every field of a word at once, so that the -1 of a zero point 0 borrows from its neighbour: only
# the sum of whole words gives both back. Three bits lie across words, and are counted one by one.
_ONES = {2: np.uint32(0x55555555), 4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


class GptqLayout(Layout):
    name = "GPTQ"

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._bits: int = self.choice(source, config, "bits", _BITS)
        self._group_size = self.group_size(source, config, "group_size")
        self._is_less_one = _FORMATS[self.choice(source, config, "checkpoint_format", tuple(_FORMATS))]
        self.choice(source, config, "dynamic", (None, {}))  # modules of other bits and groups
        self._act_order = bool(config.get("desc_act"))

    def weight(self, module: Module) -> IntegerWeight | None:
        if "qweight" not in module:
            return None
        qweight = module.part("qweight", ("int32",))
        columns, rows = qweight.shape[0] * 32 // self._bits, qweight.shape[1]
        group_size = self._group_size or columns
        groups = -(-columns // group_size)
        scales = module.part("scales", SCALE_FLOATS, (groups, rows))
        zeros = module.part("qzeros", ("int32",), (groups, num_words(rows, self._bits)))
        if self._act_order and "g_idx" not in module:
            raise module.refused("has no g_idx, though desc_act is true; get the checkpoint again")
        g_idx = module.optional("g_idx", ("int32",), (columns,))
        index = None if g_idx is None else group_index(module, g_idx, group_size, groups)
        return _GptqWeight(
            (rows, columns), (qweight, scales, zeros, g_idx), self._bits, group_size, index, self._is_less_one
        )


class _GptqWeight(IntegerWeight):
    def __init__(
        self,
        shape: tuple[int, int],
        parts: tuple[Part, Part, Part, Part | None],
        bits: int,
        group_size: int,
        group_index: npt.NDArray[np.int32] | None,
        is_less_one: bool,
    ) -> None:
        super().__init__(shape, parts, bits=bits, group_size=group_size, has_zeros=True, group_index=group_index)
        self._qweight, self._scales, self._qzeros = parts[:3]
        self._is_less_one = is_less_one

    def unsigned(self, begin: int, end: int) -> UInt8:
        return unpack_bits(self._qweight.load()[:, begin:end].T, self.bits, self.shape[1])

    def group_scales(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._scales.load()[:, begin:end].T

    def group_zeros(self, begin: int, end: int) -> UInt8:
        # 32 outputs fill whole words, whatever the number of bits.
        first = begin // 32 * 32
        words = self._qzeros.load()[:, num_words(first, self.bits) : num_words(end, self.bits)]
        one = _ONES.get(self.bits)
        if self._is_less_one and one is not None:
            words = words.view(np.uint32) + one
        zeros = unpack_bits(words, self.bits, end - first)[:, begin - first :].T
        if not self._is_less_one or one is not None:
            return zeros
        return (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
