"""A checkpoint's weights as network tensors: constants, or inputs where they stay outside the plan.

The layout of a matrix is the checkpoint's own, [out_features, in_features]: TensorRT multiplies by the transposed
matrix and dequantizes in blocks along the last axis, so that four-bit values are packed as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from builder.network.weights import DecoderWeights
from builder.targets.tensorrt.dequantize import dequantized
from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.payload import Payload, deferred_cast, float_payload
from builder.targets.tensorrt.scratch_file import ScratchFile
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import QuantizedTensor


@dataclass(frozen=True)
class Matrix:
    """A weight [out_features, in_features] in the network, and what happens to its inputs."""

    tensor: Tensor  # of the network's dtype
    stored: QuantizedTensor
    input_scale: Tensor | None = None  # [] of static activations
    pre_quant_scale: Tensor | None = None  # [1, in_features]


class WeightTensors:
    """Each weight becomes one tensor, however often it is used. ``on_weight`` is told the name of each matrix."""

    def __init__(
        self,
        graph: Graph,
        weights: DecoderWeights,
        *,
        external: bool,
        on_weight: Callable[[str], None],
        scratch: ScratchFile | None = None,
    ) -> None:
        self._graph = graph
        self._scratch = scratch
        self._weights = weights
        self._is_external = external
        self._on_weight = on_weight
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[tuple[str, int], Tensor] = {}
        self.external: dict[str, Payload] = {}  # by the name of the network input
        self.schemes: dict[str, int] = {}  # how many matrices of each scheme
        self.activations: set[str] = set()  # schemes of the inputs of linears

    def place(self, name: str, payload: Payload) -> Tensor:
        if not self._is_external:
            return self._graph.constant(name, payload.now() if self._scratch is None else self._scratch.keep(payload))
        self.external[name] = payload
        return self._graph.input(name, payload.dtype, payload.shape)

    def vector(self, name: str, rank: int) -> Tensor:
        """A norm weight or bias in float32, broadcast over ``rank`` dimensions: [1, ..., features]."""
        if (name, rank) not in self._vectors:
            values = self._weights.vector(name)
            if rank > 1 and (name, 1) in self._vectors:
                raise ValueError(f"{name} is used with two ranks")
            payload = float_payload(values.reshape((1,) * (rank - 1) + (-1,)), "float32", name)
            self._vectors[name, rank] = self.place(name, payload)
        return self._vectors[name, rank]

    def matrix(self, name: str) -> Matrix:
        if name not in self._matrices:
            self._on_weight(name)
            stored = self._weights.matrix(name)
            self.schemes[stored.scheme] = self.schemes.get(stored.scheme, 0) + 1
            if stored.activations is not None:
                self.activations.add(stored.activations.scheme)
            if stored.scheme == "none":
                tensor = self._floats(name, stored.values)
            else:
                tensor = dequantized(self._graph, self.place, name, stored)
            self._matrices[name] = Matrix(tensor, stored, *self._inputs(name, stored))
        return self._matrices[name]

    def _floats(self, name: str, values: npt.NDArray[Any]) -> Tensor:
        dtype = self._graph.dtype
        if self._is_external and values.dtype.name != dtype:
            return self.place(name, deferred_cast(values, dtype, name))  # compiling needs the shape alone
        if self._is_external or self._scratch is None:
            return self.place(name, float_payload(values, dtype, name))
        return self._graph.constant(name, self._scratch.cast(values, dtype, name))

    def kv_scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Scales [] of int8 keys and values, float32; None where the checkpoint has none for int8."""
        found = self._weights.kv_scales(layer)
        if found is None or found[0] != "int8":
            return None
        prefix = f"model.layers.{layer}.self_attn."
        names = (f"{prefix}k_proj.k_scale", f"{prefix}v_proj.v_scale")
        key, value = (
            self.place(name, float_payload(np.asarray(scale), "float32", name))
            for name, scale in zip(names, found[1:], strict=True)
        )
        return key, value

    def _inputs(self, name: str, stored: QuantizedTensor) -> tuple[Tensor | None, Tensor | None]:
        """Tensors of the static scale of the inputs, and of their multiplier."""
        module = name.removesuffix(".weight")
        scale = multiplier = None
        if self._is_external and stored.activations is not None and stored.activations.scheme == "nvfp4":
            raise BuildError(
                f"{module} has nvfp4 activations, whose scale TensorRT takes as a constant alone; "
                "set build.weights to embedded"
            )
        if stored.input_scale is not None:
            part = f"{module}.input_scale"
            # The builder wants one type of scale for both factors of a product.
            dtype = self._graph.dtype if stored.scheme == "int4" else "float32"
            scale = self.place(part, float_payload(np.asarray(stored.input_scale), dtype, part))
        if stored.pre_quant_scale is not None:
            part = f"{module}.pre_quant_scale"
            payload = float_payload(stored.pre_quant_scale.reshape(1, -1), self._graph.dtype, part)
            multiplier = self.place(part, payload)
        return scale, multiplier
