"""One rank's weights, with the interface of those of the whole checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource, expected_weights
from builder.parallel import Rank
from builder.sharding.cuts import cut_of
from builder.sharding.slices import cut_weight
from plansmith_errors import BuildError

if TYPE_CHECKING:
    from quantize import QuantizedTensor


def spec_of_rank(spec: ModelSpec, rank: Rank) -> ModelSpec:
    """``spec`` with as many heads and MLP features as ``rank`` has.

    Layers, vocabulary and experts stay those of the model: a rank takes its own of them by ``rank``.
    """
    tp_size = rank.parallelism.tp_size
    mixture = spec.mixture
    if mixture is not None:
        mixture = replace(mixture, intermediate_size=mixture.intermediate_size // rank.parallelism.moe_tp_size)
    return replace(
        spec,
        num_heads=spec.num_heads // tp_size,
        num_kv_heads=max(spec.num_kv_heads // tp_size, 1),
        intermediate_size=spec.intermediate_size // tp_size,
        mixture=mixture,
    )


class ShardedWeights:
    """Implements DecoderWeights: slices of ``source``, as they are stored, of the weights that ``rank`` needs.

    ``spec`` is that of the whole model and has passed ``check_parallelism``. Slices of a mapped file are views of it,
    so that a rank reads little but its own bytes. Of a tied embedding, first and last stage have a slice each.
    """

    def __init__(self, source: WeightSource, spec: ModelSpec, rank: Rank) -> None:
        self._source = source
        self._whole = dict(_weights_of(spec, rank))
        self._cuts = {name: cut_of(name, shape, spec, rank) for name, shape in self._whole.items()}
        self.shapes = {
            name: shape if (cut := self._cuts[name]) is None else cut.shape_of(shape)
            for name, shape in self._whole.items()
        }
        self.kinds: set[tuple[str, int | None]] = set()

    def matrix(self, name: str) -> QuantizedTensor:
        """The rank's part of an embedding or linear weight, [out_features, in_features].

        Raises BuildError where the part would tear a group of quantized weights, or holds NaN or infinity.
        """
        weight = self.stored(name)
        self.kinds.add((weight.scheme, weight.group_size))
        return self._source.checked(name, weight)

    def stored(self, name: str) -> QuantizedTensor:
        """The same, not read yet where the file is mapped."""
        weight, cut = self._source.stored(name), self._cuts[name]
        if cut is None:
            return weight
        try:
            return cut_weight(weight, cut)
        except BuildError as error:
            raise BuildError(f"{name}: {error}; lower tp_size or quantize with smaller groups") from None

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm weight or bias, [features]; its part where the linear's outputs are split."""
        values, cut = self._source.vector(name), self._cuts[name]
        return values if cut is None else values[cut.begin : cut.end]

    def kv_scales(self, layer: int) -> tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]] | None:
        """See DecoderWeights: a layer's heads share one scale, and so do its ranks."""
        return self._source.kv_scales(layer)


def _weights_of(spec: ModelSpec, rank: Rank) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and whole shape of each weight of which ``rank`` holds something."""
    layers = rank.layers(spec.num_layers)
    held = rank.experts(spec.mixture.num_experts) if spec.mixture is not None else range(0)
    for name, shape in expected_weights(spec).items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) in layers and ("experts" not in parts or int(parts[-3]) in held):
                yield name, shape
        elif name == "model.embed_tokens.weight":
            if rank.is_first_stage or (rank.is_last_stage and spec.tie_word_embeddings):
                yield name, shape
        elif rank.is_last_stage:
            yield name, shape
