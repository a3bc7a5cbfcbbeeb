"""What a checkpoint says of the inputs of its linears, as quantize-dequantize pairs that the builder fuses."""

from __future__ import annotations

from collections.abc import Callable

from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.weights import Matrix

_LARGEST = {"fp8": 448.0, "int8": 127.0}
# Scales of a token's values are such that these come near 1: products of raw codes could pass float16's range.
_UNIT = {"fp8": 2.0**-8, "int8": 2.0**-7}
_SMALLEST = 1e-12  # of the scale of a token of zeros
_LOWEST = {"float16": -65504.0, "bfloat16": -3e38, "float32": -3e38}


def multiply_inputs(graph: Graph, x: Tensor, matrix: Matrix, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """``multiply`` of the inputs as the checkpoint rounds them; what it returns is scaled back where that is due."""
    if matrix.pre_quant_scale is not None:
        x = graph.multiply(x, matrix.pre_quant_scale)
    activations = matrix.stored.activations
    if activations is None:
        return multiply(x)
    if activations.scheme == "nvfp4":
        return multiply(_block_rounded(graph, x, matrix.input_scale))
    if matrix.input_scale is None:
        return _per_token(graph, x, activations.scheme, multiply)
    rounded = graph.dequantize(graph.quantize(x, matrix.input_scale, activations.scheme), matrix.input_scale)
    if matrix.stored.scheme == "int4":
        # The builder knows no product of these two and fails on the pair. Behind an operation that changes nothing it
        # multiplies the rounded values as floats.
        rounded = graph.elementwise(rounded, graph.full(rounded, _LOWEST[graph.dtype]), "MAX")
    return multiply(rounded)


def _per_token(graph: Graph, x: Tensor, scheme: str, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """A scale of each row, found in float32. There is no such quantize layer: rows are divided by it, rounded by a
    constant scale, and their products multiplied.
    """
    unit, code = _UNIT[scheme], "fp8" if scheme == "fp8" else "int8"
    exact = graph.cast(x, "float32")
    largest = graph.reduce_last(graph.unary(exact, "ABS"), "MAX")
    step = graph.scaled(largest, 1 / _LARGEST[scheme])
    step = graph.elementwise(step, graph.full(step, _SMALLEST, "float32"), "MAX")
    scale = graph.scaled(step, 1 / unit)
    constant = graph.literal(unit, "float32")
    codes = graph.quantize(graph.divide(exact, scale), constant, code)  # type: ignore[arg-type]
    product = multiply(graph.dequantize(codes, constant))
    return graph.cast(graph.multiply(graph.cast(product, "float32"), scale))


def _block_rounded(graph: Graph, x: Tensor, scale: Tensor | None) -> Tensor:
    """nvfp4: blocks of 16 whose e4m3 scales are found as it runs, times the static ``scale`` [] of the tensor."""
    if scale is None:
        raise ValueError("nvfp4 activations have a static scale of the tensor")
    trt = graph.trt
    layer = graph.added(graph.network.add_dynamic_quantize(x, len(x.shape) - 1, 16, trt.fp4, trt.fp8))
    layer.set_input(1, scale)
    blocks = graph.dequantize(layer.get_output(1), scale, dtype="float32")
    return graph.dequantize(layer.get_output(0), graph.cast(blocks))
