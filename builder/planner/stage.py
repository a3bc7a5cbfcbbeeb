"""One rank's share of a decoder: the layers of its pipeline stage, each as tensor parallelism leaves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from builder.parallel import Parallelism, Rank
from builder.planner.decoder_shape import DecoderShape, LayerShape
from builder.planner.local import LayerCost, LinearCost, layer_cost, matrix_cost
from builder.planner.precision import Precision

_VECTOR_BYTES = 2


@dataclass(frozen=True)
class Stage:
    """What all ranks of one pipeline stage have alike."""

    parallelism: Parallelism
    layers: tuple[tuple[LayerCost, int], ...]  # each kind of layer and how many of it
    hidden_size: int
    vocab_size: int
    embeddings: LinearCost | None  # of the first stage
    head: LinearCost | None  # of the last
    weight_bytes: int

    @property
    def is_first(self) -> bool:
        return self.embeddings is not None

    @property
    def is_last(self) -> bool:
        return self.head is not None

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def kv_elements(self) -> int:
        """That one token leaves in the cache of this rank, of all its layers."""
        return sum(cost.kv_elements * count for cost, count in self.layers)

    @property
    def most_kv_elements(self) -> int:
        """Of one layer."""
        return max(cost.kv_elements for cost, _ in self.layers)

    @property
    def query_width(self) -> int:
        return max(cost.attention.output_width for cost, _ in self.layers) // self.parallelism.tp_size

    @property
    def num_kept_scores(self) -> int:
        """For each query and key token: one of each head where scores are soft-capped, else none."""
        heads = max((cost.attention.num_heads for cost, _ in self.layers if cost.attention.is_capped), default=0)
        return heads // self.parallelism.tp_size

    @property
    def mlp_elements(self) -> int:
        return max(cost.mlp_elements for cost, _ in self.layers)

    @property
    def local_vocab_size(self) -> int:
        return self.vocab_size // self.parallelism.tp_size


def pipeline_stages(shape: DecoderShape, precision: Precision, parallelism: Parallelism) -> list[Stage]:
    """In order. Raises QuantizeError where the recipe does not fit a rank's part of a matrix."""
    costs = layer_costs(shape, precision, parallelism)
    embeddings = matrix_cost(shape.embeddings, "model.embed_tokens.weight", precision, parallelism)
    head = matrix_cost(shape.lm_head, f"{shape.lm_head.name}.weight", precision, parallelism)
    ranks = (Rank(parallelism, stage * parallelism.tp_size) for stage in range(parallelism.pp_size))
    return [_stage(shape, costs, rank, embeddings, head) for rank in ranks]


def layer_costs(shape: DecoderShape, precision: Precision, parallelism: Parallelism) -> list[LayerCost]:
    """Of every layer; those that are alike are the same object, or equal ones."""
    if precision.differs_by_name:
        return [layer_cost(layer, index, precision, parallelism) for index, layer in enumerate(shape.layers)]
    known: dict[LayerShape, LayerCost] = {}
    for index, layer in enumerate(shape.layers):
        if layer not in known:
            known[layer] = layer_cost(layer, index, precision, parallelism)
    return [known[layer] for layer in shape.layers]


def _stage(
    shape: DecoderShape, costs: Sequence[LayerCost], rank: Rank, embeddings: LinearCost, head: LinearCost
) -> Stage:
    own = Counter(costs[layer] for layer in rank.layers(shape.num_layers))
    weight_bytes = sum(cost.weight_bytes * count for cost, count in own.items())
    if rank.is_first_stage:
        weight_bytes += embeddings.nbytes
    if rank.is_last_stage:
        is_shared = shape.is_tied and rank.is_first_stage
        weight_bytes += _VECTOR_BYTES * shape.hidden_size + (0 if is_shared else head.nbytes)
    return Stage(
        parallelism=rank.parallelism,
        layers=tuple(own.items()),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        embeddings=embeddings if rank.is_first_stage else None,
        head=head if rank.is_last_stage else None,
        weight_bytes=weight_bytes,
    )
