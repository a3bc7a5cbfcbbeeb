"""Which function computes which kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from builder.network.interpreter import (
    arithmetic,
    attention,
    fill,
    indexing,
    products,
    quantization,
    reductions,
    shapes,
)


@dataclass(frozen=True)
class Operation:
    """``compute(layer, inputs)`` returns one array, or a tuple where the layer has several outputs."""

    interface: str  # the layer's class in the TensorRT module
    compute: Callable[[Any, list[Any]], Any]
    moves: bool = False  # values come out as they went in: inputs are not widened and outputs not rounded


OPERATIONS = {
    "ACTIVATION": Operation("IActivationLayer", arithmetic.activation),
    "CAST": Operation("ICastLayer", arithmetic.cast),
    "ELEMENTWISE": Operation("IElementWiseLayer", arithmetic.elementwise),
    "SELECT": Operation("ISelectLayer", arithmetic.select),
    "UNARY": Operation("IUnaryLayer", arithmetic.unary),
    "CUMULATIVE": Operation("ICumulativeLayer", reductions.cumulative),
    "NORMALIZATION": Operation("INormalizationLayer", reductions.normalization),
    "REDUCE": Operation("IReduceLayer", reductions.reduce),
    "SOFTMAX": Operation("ISoftMaxLayer", reductions.softmax),
    "TOPK": Operation("ITopKLayer", reductions.top_k),
    "EINSUM": Operation("IEinsumLayer", products.einsum),
    "MATRIX_MULTIPLY": Operation("IMatrixMultiplyLayer", products.matrix_multiply),
    "CONCATENATION": Operation("IConcatenationLayer", shapes.concatenation, moves=True),
    "IDENTITY": Operation("IIdentityLayer", shapes.identity, moves=True),
    "SHAPE": Operation("IShapeLayer", shapes.shape, moves=True),
    "SHUFFLE": Operation("IShuffleLayer", shapes.shuffle, moves=True),
    "SLICE": Operation("ISliceLayer", shapes.slice_, moves=True),
    "SQUEEZE": Operation("ISqueezeLayer", shapes.squeeze, moves=True),
    "UNSQUEEZE": Operation("IUnsqueezeLayer", shapes.unsqueeze, moves=True),
    "GATHER": Operation("IGatherLayer", indexing.gather, moves=True),
    "NON_ZERO": Operation("INonZeroLayer", indexing.non_zero),
    "ONE_HOT": Operation("IOneHotLayer", indexing.one_hot),
    "SCATTER": Operation("IScatterLayer", indexing.scatter, moves=True),
    "DEQUANTIZE": Operation("IDequantizeLayer", quantization.dequantize),
    "DYNAMIC_QUANTIZE": Operation("IDynamicQuantizeLayer", quantization.dynamic_quantize),
    "QUANTIZE": Operation("IQuantizeLayer", quantization.quantize),
    "FILL": Operation("IFillLayer", fill.fill),
    "ATTENTION_INPUT": Operation("IAttentionInputLayer", attention.attention_input, moves=True),
    "KV_CACHE_UPDATE": Operation("IKVCacheUpdateLayer", attention.kv_cache_update, moves=True),
    "ROTARY_EMBEDDING": Operation("IRotaryEmbeddingLayer", attention.rotary_embedding),
}
# Computed by the interpreter itself: they need more than their inputs.
CONSTANT, ATTENTION_OUTPUT, COLLECTIVE = "CONSTANT", "ATTENTION_OUTPUT", "DIST_COLLECTIVE"
INTERFACES = {
    **{kind: operation.interface for kind, operation in OPERATIONS.items()},
    CONSTANT: "IConstantLayer",
    ATTENTION_OUTPUT: "IAttentionOutputLayer",
    COLLECTIVE: "IDistCollectiveLayer",
}
