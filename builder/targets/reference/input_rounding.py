"""What a checkpoint says of the inputs of its linears, of keys and of values, done in float32: rounded and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.network.weights import DecoderWeights

if TYPE_CHECKING:
    from torch import Tensor

    from quantize import QuantizedTensor

_INT8_MAX, _E4M3_MAX, _BLOCK = 127.0, 448.0, 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class InputRounding:
    """Of one linear: inputs [..., in] are multiplied by ``multiplier`` [in], then rounded to ``scheme``."""

    scheme: str | None = None  # fp8, int8, nvfp4; None: not rounded
    scale: Tensor | None = None  # static, []; None: of each token
    multiplier: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.multiplier is None else x * self.multiplier
        if self.scheme is None:
            return x
        if self.scheme == "nvfp4":
            return _round_nvfp4(x, self.scale)
        largest = _INT8_MAX if self.scheme == "int8" else _E4M3_MAX
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest if self.scale is None else self.scale
        return _round(x / scale, self.scheme) * scale


Rounding = Callable[["Tensor"], "Tensor"]


def input_rounding(weight: QuantizedTensor) -> InputRounding | None:
    """None for a linear whose inputs stay as they are."""
    import torch

    if weight.activations is None and weight.pre_quant_scale is None:
        return None
    scale, multiplier = (
        None if array is None else torch.tensor(array) for array in (weight.input_scale, weight.pre_quant_scale)
    )
    return InputRounding(None if weight.activations is None else weight.activations.scheme, scale, multiplier)


def kv_roundings(weights: DecoderWeights, layer: int) -> tuple[Rounding, Rounding]:
    """Of the keys and the values of a layer; without scales they stay as they are."""
    import torch

    found = weights.kv_scales(layer)
    if found is None:
        return _same, _same
    scheme, *scales = found
    key, value = (InputRounding(scheme, torch.tensor(scale)) for scale in scales)
    return key, value


def _same(x: Tensor) -> Tensor:
    return x


def _round(steps: Tensor, scheme: str) -> Tensor:
    import torch

    if scheme == "int8":
        # Scales are symmetric and reach 127; what passes a static one is clamped where TensorRT clamps it.
        return steps.round().clamp(-_INT8_MAX - 1, _INT8_MAX)
    return steps.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _round_nvfp4(x: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """Blocks of 16 whose e4m3 scales are found as it runs; ``tensor_scale`` [] times those is the step."""
    import torch

    if tensor_scale is None:
        raise ValueError("nvfp4 activations have a static scale of the tensor")
    blocks = x.reshape(*x.shape[:-1], -1, _BLOCK)
    scales = _round(blocks.abs().amax(-1, keepdim=True) / (6 * tensor_scale), "fp8").clamp(min=2**-9) * tensor_scale
    steps = (blocks / scales).clamp(-6, 6)
    grid = torch.tensor(_E2M1)
    # Halfway between two values lies the boundary; which way an exact tie goes is below what is measured here.
    nearest = grid[torch.bucketize(steps.abs(), (grid[1:] + grid[:-1]) / 2)]
    return (nearest * steps.sign() * scales).reshape(x.shape)
