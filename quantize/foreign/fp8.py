"""`quant_method: fp8`: e4m3 weights with weight_scale_inv per block, as DeepSeek publishes, or weight_scale per tensor.

https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md): in spite of its name, values are multiplied by
weight_scale_inv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantize.foreign.float_weight import read_fp8
from quantize.foreign.layout import Layout, read_block
from quantize.foreign.packed_weight import PackedWeight
from quantize.foreign.parts import Module


class Fp8Layout(Layout):
    name = "FP8"

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self.choice(source, config, "fmt", (None, "e4m3", "float8_e4m3fn"))
        sizes = config.get("weight_block_size")
        self._block = None if sizes is None else read_block(f"{source}: weight_block_size", sizes)

    def weight(self, module: Module) -> PackedWeight | None:
        for scales in ("weight_scale_inv", "weight_scale"):
            if scales in module:
                return read_fp8(module, scales, self._block)
        if "weight" in module and module.dtype("weight") == "float8_e4m3fn":
            raise module.refused("has an e4m3 weight but neither weight_scale_inv nor weight_scale")
        return None
