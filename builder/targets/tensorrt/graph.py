"""Small words over ``INetworkDefinition``. Whatever TensorRT refuses ends in a BuildError that says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.build_log import BuildLog
from builder.targets.tensorrt.options import NetworkDtype, StepMode
from builder.targets.tensorrt.payload import ElementType, Payload, float_payload, raw_payload
from plansmith_errors import BuildError

Tensor = Any  # ITensor: the modules have no type information
Profile = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # shapes: minimum, optimum, maximum

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


class Graph:
    """One network, its builder, and all that must live as long as they do."""

    def __init__(self, trt: Any, dtype: NetworkDtype) -> None:
        self.trt = trt
        self.dtype: NetworkDtype = dtype
        self.log = BuildLog()
        self._logger = self.log.logger(trt)
        self.builder = trt.Builder(self._logger)
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.payloads: dict[str, Payload] = {}  # by the name of the constant layer
        self.profiles: dict[StepMode, dict[str, Profile]] = {"mixed": {}, "decode": {}}
        self._item_bytes: dict[str, int] = {}  # of an element, by input; not of four-bit ones
        self._literals: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}

    def type_of(self, dtype: ElementType) -> Any:
        return getattr(self.trt, dtype)

    def added(self, layer: Any, name: str | None = None) -> Any:
        """``layer`` under ``name``. Raises BuildError where TensorRT gave None."""
        if layer is None:
            reason = self.log.first_error or "it gives no reason"
            raise BuildError(f"TensorRT refuses a layer{f' for {name}' if name else ''}: {reason}")
        if name is not None:
            layer.name = name
        return layer

    def set_checked(self, layer: Any, attribute: str, value: Any) -> None:
        """Set an optional tensor of a layer: some setters log an error and leave None."""
        setattr(layer, attribute, value)
        if getattr(layer, attribute) is None:
            raise BuildError(f"TensorRT refuses {attribute} of {layer.name}: {self.log.first_error}")

    # Inputs, outputs and constants

    def input(
        self, name: str, dtype: ElementType, shape: Sequence[int], profiles: Mapping[StepMode, Profile] | None = None
    ) -> Tensor:
        """A network input; ``profiles`` where ``shape`` has dimensions of -1."""
        for mode, profile in (profiles or {}).items():
            self.profiles[mode][name] = profile
        self._item_bytes[name] = _ITEM_BYTES.get(dtype, 1)
        return self.added(self.network.add_input(name, self.type_of(dtype), tuple(shape)), name)

    def item_bytes(self, name: str) -> int:
        """Bytes of an element of the input ``name``."""
        return self._item_bytes[name]

    def output(self, x: Tensor, name: str) -> None:
        x.name = name
        self.network.mark_output(x)

    def constant(self, name: str, payload: Payload) -> Tensor:
        """A constant layer over the payload's own memory: nothing is copied here."""
        if name in self.payloads:
            raise ValueError(f"there is a constant {name} already")
        self.payloads[name] = payload
        size = int(np.prod(payload.shape, dtype=np.int64))
        weights = self.trt.Weights(self.type_of(payload.dtype), payload.array.ctypes.data, size)
        return self.added(self.network.add_constant(payload.shape, weights), name).get_output(0)

    def literal(self, values: npt.ArrayLike, dtype: ElementType | None = None) -> Tensor:
        """A small constant of the network's dtype, or of ``dtype``; equal ones are made once."""
        dtype = dtype or self.dtype
        array = np.asarray(values)
        if dtype in ("float32", "float16", "bfloat16"):
            payload = float_payload(array.astype(np.float32), dtype, "a constant")  # type: ignore[arg-type]
        else:
            payload = raw_payload(dtype, array.astype(dtype))
        key = (dtype, payload.shape, payload.array.tobytes())
        if key not in self._literals:
            self._literals[key] = self.constant(f"constant:{len(self._literals)}", payload)
        return self._literals[key]

    def full(self, like: Tensor, value: float, dtype: ElementType | None = None) -> Tensor:
        """``value`` in as many dimensions as ``like`` has, each of size 1."""
        return self.literal(np.full((1,) * len(like.shape), value), dtype)

    # Arithmetic

    def elementwise(self, a: Tensor, b: Tensor, operation: str) -> Tensor:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.added(self.network.add_elementwise(a, b, kind)).get_output(0)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(a, b, "SUM")

    def subtract(self, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(a, b, "SUB")

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(a, b, "PROD")

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return self.elementwise(a, b, "DIV")

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return self.multiply(x, self.full(x, factor, self.float_type(x)))

    def float_type(self, x: Tensor) -> ElementType:
        """ "float32" or the network's dtype."""
        return "float32" if x.dtype == self.trt.float32 else self.dtype

    def unary(self, x: Tensor, operation: str) -> Tensor:
        return self.added(self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation))).get_output(0)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return self.added(self.network.add_activation(x, getattr(self.trt.ActivationType, kind))).get_output(0)

    def reduce_last(self, x: Tensor, operation: str) -> Tensor:
        """Over the last dimension, which stays with size 1."""
        kind = getattr(self.trt.ReduceOperation, operation)
        return self.added(self.network.add_reduce(x, kind, 1 << (len(x.shape) - 1), True)).get_output(0)

    def softmax_last(self, x: Tensor) -> Tensor:
        layer = self.added(self.network.add_softmax(x))
        layer.axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def cast(self, x: Tensor, dtype: ElementType | None = None) -> Tensor:
        """To the network's dtype, or to ``dtype``; ``x`` itself where it has it."""
        wanted = self.type_of(dtype or self.dtype)
        return x if x.dtype == wanted else self.added(self.network.add_cast(x, wanted)).get_output(0)

    def matmul(self, a: Tensor, b: Tensor, name: str | None = None, *, transpose_b: bool = False) -> Tensor:
        plain, transposed = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        layer = self.network.add_matrix_multiply(a, plain, b, transposed if transpose_b else plain)
        return self.added(layer, name).get_output(0)

    def select(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.added(self.network.add_select(condition, a, b)).get_output(0)

    # Shapes and places

    def shuffle(
        self,
        x: Tensor,
        shape: Sequence[int] | Tensor | None = None,
        *,
        first: Sequence[int] | None = None,
        second: Sequence[int] | None = None,
    ) -> Tensor:
        """Transpose by ``first``, reshape to ``shape`` (0 keeps a size, -1 is inferred), transpose by ``second``."""
        layer = self.added(self.network.add_shuffle(x))
        if first is not None:
            layer.first_transpose = self.trt.Permutation(list(first))
        if isinstance(shape, Sequence):
            layer.reshape_dims = tuple(shape)
        elif shape is not None:
            layer.set_input(1, shape)
        if second is not None:
            layer.second_transpose = self.trt.Permutation(list(second))
        return layer.get_output(0)

    def gather(self, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        return self.added(self.network.add_gather(x, indices, axis)).get_output(0)

    def shape(self, x: Tensor) -> Tensor:
        """Sizes, int64 [rank]."""
        return self.added(self.network.add_shape(x)).get_output(0)

    def size(self, x: Tensor, axis: int) -> Tensor:
        """One size, int64 [1]."""
        return self.slice(self.shape(x), (axis,), (1,))

    def slice(self, x: Tensor, start: Sequence[int], size: Sequence[int] | Tensor) -> Tensor:
        """``size`` elements from ``start``; a tensor where it is known at run time alone."""
        known = isinstance(size, Sequence)
        layer = self.added(
            self.network.add_slice(x, tuple(start), tuple(size) if known else tuple(start), (1,) * len(start))
        )
        if not known:
            layer.set_input(2, size)
        return layer.get_output(0)

    def concatenate(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        layer = self.added(self.network.add_concatenation(list(parts)))
        layer.axis = axis
        return layer.get_output(0)

    # Quantization

    def dequantize(
        self,
        x: Tensor,
        scale: Tensor,
        *,
        axis: int | None = None,
        block_shape: tuple[int, int] | None = None,
        dtype: ElementType | None = None,
    ) -> Tensor:
        """By a scale [] of the tensor, [n] along ``axis``, or one of each block."""
        layer = self.added(self.network.add_dequantize(x, scale, self.type_of(dtype or self.dtype)))
        if axis is not None:
            layer.axis = axis
        if block_shape is not None:
            layer.block_shape = block_shape
        return layer.get_output(0)

    def quantize(self, x: Tensor, scale: Tensor, dtype: ElementType) -> Tensor:
        """By a scale [] of the tensor."""
        return self.added(self.network.add_quantize(x, scale, self.type_of(dtype))).get_output(0)
