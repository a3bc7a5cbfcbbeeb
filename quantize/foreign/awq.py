"""AWQ files (AutoAWQ, version gemm): qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out].

https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py: eight outputs in a word, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import CheckpointError
from quantize.foreign.bits import UInt8
from quantize.foreign.integer_weight import IntegerWeight
from quantize.foreign.layout import Layout, shorten
from quantize.foreign.parts import SCALE_FLOATS, Module, Part

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)  # which nibble of a word each of its outputs is
_PER_WORD = 8


class AwqLayout(Layout):
    name = "AWQ"

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self.choice(source, config, "w_bit" if "w_bit" in config else "bits", (4,))
        self._group_size = self.group_size(source, config, "q_group_size" if "q_group_size" in config else "group_size")
        version = config.get("version", config.get("checkpoint_format", "gemm"))
        if not isinstance(version, str) or version.lower() != "gemm":
            raise CheckpointError(
                f"{source}: version is {shorten(version)}, expected 'gemm'; quantize the original model"
            )

    def weight(self, module: Module) -> IntegerWeight | None:
        if "qweight" not in module:
            return None
        qweight = module.part("qweight", ("int32",))
        columns, rows = qweight.shape[0], qweight.shape[1] * _PER_WORD
        group_size = self._group_size or columns
        groups = -(-columns // group_size)
        scales = module.part("scales", SCALE_FLOATS, (groups, rows))
        zeros = module.optional("qzeros", ("int32",), (groups, rows // _PER_WORD))
        return _AwqWeight((rows, columns), qweight, scales, zeros, group_size)


class _AwqWeight(IntegerWeight):
    def __init__(
        self, shape: tuple[int, int], qweight: Part, scales: Part, qzeros: Part | None, group_size: int
    ) -> None:
        super().__init__(shape, (qweight, scales, qzeros), bits=4, group_size=group_size, has_zeros=qzeros is not None)
        self._qweight = qweight
        self._scales = scales
        self._qzeros = qzeros

    def unsigned(self, begin: int, end: int) -> UInt8:
        return np.ascontiguousarray(_outputs(self._qweight, begin, end))

    def group_scales(self, begin: int, end: int) -> npt.NDArray[Any]:
        return self._scales.load()[:, begin:end].T

    def group_zeros(self, begin: int, end: int) -> UInt8:
        return np.empty((0, 0), np.uint8) if self._qzeros is None else _outputs(self._qzeros, begin, end)


def _outputs(packed: Part, begin: int, end: int) -> UInt8:
    """Words [n, out / 8] to the values of outputs ``begin:end``: [end - begin, n]."""
    first = begin // _PER_WORD
    words = packed.load()[:, first : -(-end // _PER_WORD)].view(np.uint32)
    values = ((words[:, :, None] >> (4 * _PLACES)) & np.uint32(15)).astype(np.uint8)
    return values.reshape(len(words), -1)[:, begin - first * _PER_WORD : end - first * _PER_WORD].T
