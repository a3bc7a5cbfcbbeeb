"""Layers that compute each element by itself. Inputs are float32 or integers; the caller rounds what they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from builder.network.interpreter.values import Array


def elementwise(layer: Any, inputs: list[Array]) -> Array:
    """IElementWiseLayer, with broadcasting."""
    a, b = inputs
    return _BINARY[layer.op.name](a, b)


def unary(layer: Any, inputs: list[Array]) -> Array:
    """IUnaryLayer."""
    (x,) = inputs
    return _UNARY[layer.op.name](x)


def activation(layer: Any, inputs: list[Array]) -> Array:
    """IActivationLayer; the formulas are those of TensorRT's ActivationType."""
    (x,) = inputs
    return _ACTIVATIONS[layer.type.name](x, layer.alpha, layer.beta)


def cast(layer: Any, inputs: list[Array]) -> Array:
    """ICastLayer: the caller rounds to the output's type; floats become integers by cutting off, bools by 0 and 1."""
    (x,) = inputs
    return x


def select(layer: Any, inputs: list[Array]) -> Array:
    """ISelectLayer, with broadcasting."""
    condition, then, otherwise = inputs
    return np.where(condition, then, otherwise)


def _divide(a: Array, b: Array) -> Array:
    # As in C: integers are cut off towards zero, which NumPy's // does not do.
    return np.divide(a, b) if a.dtype.kind == "f" else np.trunc(a / b).astype(a.dtype)


def erf(x: Array) -> Array:
    values = [math.erf(value) for value in x.ravel().tolist()]
    return np.array(values, np.float32).reshape(x.shape)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(math.sqrt(2 / math.pi)) * (np.float32(0.044715) * x * x * x + x)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": _divide,
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}
_UNARY: dict[str, Callable[[Array], Array]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": np.reciprocal,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "TAN": np.tan,
    "SINH": np.sinh,
    "COSH": np.cosh,
    "ASIN": np.arcsin,
    "ACOS": np.arccos,
    "ATAN": np.arctan,
    "ASINH": np.arcsinh,
    "ACOSH": np.arccosh,
    "ATANH": np.arctanh,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ERF": erf,
    "NOT": np.logical_not,
    "SIGN": np.sign,
    "ROUND": np.rint,  # half to even
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}
_ACTIVATIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "RELU": lambda x, alpha, beta: np.maximum(x, 0),
    "SIGMOID": lambda x, alpha, beta: sigmoid(x),
    "TANH": lambda x, alpha, beta: np.tanh(x),
    "LEAKY_RELU": lambda x, alpha, beta: np.where(x >= 0, x, alpha * x),
    "ELU": lambda x, alpha, beta: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "SELU": lambda x, alpha, beta: beta * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "SOFTSIGN": lambda x, alpha, beta: x / (1 + np.abs(x)),
    "SOFTPLUS": lambda x, alpha, beta: alpha * np.logaddexp(0, beta * x),
    "CLIP": lambda x, alpha, beta: np.maximum(alpha, np.minimum(beta, x)),
    "HARD_SIGMOID": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "SCALED_TANH": lambda x, alpha, beta: alpha * np.tanh(beta * x),
    "THRESHOLDED_RELU": lambda x, alpha, beta: np.where(x > alpha, x, 0),
    "GELU_ERF": lambda x, alpha, beta: 0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5)))),
    "GELU_TANH": lambda x, alpha, beta: _gelu_tanh(x),
}
