"""What quantizing did to each tensor and to the whole."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

from quantize.activations import Activations
from quantize.weight_rule import Granularity, Method, SchemeName


@dataclass(frozen=True)
class TensorReport:
    name: str
    scheme: SchemeName
    shape: tuple[int, ...]
    group_size: int | None  # columns that share a scale: of int4, nvfp4, mxfp4 and mxfp8
    symmetric: bool
    bytes_in: int
    bytes_out: int  # with scales and zero points
    squared_norm: float
    squared_error: float
    granularity: Granularity | None = None  # of fp8
    method: Method | None = None  # of int4 tensors with a calibrated rule; rtn: of an expert with too few tokens
    is_kept: bool = False  # stored as in the source, which had the scheme already
    output_error: float | None = None  # awq, gptq: |X dW'| / |X W'| on the calibration tokens X

    activations: Activations | None = None  # what happens to the inputs of the linear
    has_pre_quant_scale: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes_out / prod(self.shape)

    @property
    def relative_error(self) -> float:
        """|W - dequantized| / |W|, Frobenius norms."""
        return sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass(frozen=True)
class QuantizeReport:
    recipe: str
    origin: str  # what the source's values are
    tensors: tuple[TensorReport, ...]
    seconds: float

    @property
    def bytes_in(self) -> int:
        return sum(tensor.bytes_in for tensor in self.tensors)

    @property
    def bytes_out(self) -> int:
        return sum(tensor.bytes_out for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes_out / sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def relative_error(self) -> float:
        """Over all tensors that were quantized."""
        changed = [tensor for tensor in self.tensors if tensor.squared_error]
        norm = sum(tensor.squared_norm for tensor in changed)
        return sqrt(sum(tensor.squared_error for tensor in changed) / norm) if norm else 0.0
