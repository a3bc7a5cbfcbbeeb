"""The tensors of a Hugging Face-named layout: linears as the layout packs them, everything else as floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quantize.activations import kv_scale_name
from quantize.export.source import ExportSource
from quantize.export.writing import PlannedTensors
from quantize.model_shape import Linear
from quantize.quantized_tensor import QuantizedTensor
from quantize.safetensors_writer import TensorSpec

_FLOAT32 = np.dtype(np.float32)

KvSpec = Callable[[str], TensorSpec]
Specs = Callable[[str, Linear], tuple[TensorSpec, ...]]
Pack = Callable[[str, QuantizedTensor], Sequence[npt.NDArray[Any]]]


def hf_tensors(
    source: ExportSource, specs: Specs, pack: Pack, kv_spec: KvSpec = lambda scale: TensorSpec(scale, _FLOAT32, ())
) -> Iterator[PlannedTensors]:
    """``specs(name, linear)`` of a quantized weight, and ``pack(name, weight)`` in the same order.

    ``kv_spec``: what the layout makes of a k_scale or v_scale, by its name in the source.
    """
    for name, size in source.shape.other_tensors():
        yield _floats(source, name, size)
    for name, linear in source.shape.linear_weights():
        if source.schemes[name].name == "none":
            yield _floats(source, name, (linear.out_features, linear.in_features))
        else:
            yield _packed(source, name, specs(name, linear), pack)
        scale, scale_name = source.kv_scale(name), kv_scale_name(name)
        if scale is not None and scale_name is not None:
            yield _scale(kv_spec(scale_name), scale)


def _floats(source: ExportSource, name: str, size: tuple[int, ...]) -> PlannedTensors:
    return PlannedTensors((TensorSpec(name, source.dtype, size),), lambda: [source.floats(name)])


def _packed(source: ExportSource, name: str, specs: tuple[TensorSpec, ...], pack: Pack) -> PlannedTensors:
    return PlannedTensors(specs, lambda: pack(name, source.weight(name)))


def _scale(spec: TensorSpec, scale: npt.NDArray[np.float32]) -> PlannedTensors:
    return PlannedTensors((spec,), lambda: [scale.reshape(spec.shape)])
