"""The network inputs of one step. Each is made when it is first used, so that a network has what it needs alone."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from builder.model_spec import ModelSpec
from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.options import NetworkOptions, StepMode
from builder.targets.tensorrt.payload import ElementType
from builder.targets.tensorrt.shapes import max_blocks_per_sequence, max_num_blocks, max_rows, query_tile


class StepTensors:
    """int32 unless said otherwise; see ``step_feeds`` for what they hold.

    A row is a sequence in ``decode``, and at most ``query_tile`` tokens of a sequence in ``mixed``.
    """

    def __init__(self, graph: Graph, spec: ModelSpec, options: NetworkOptions, mode: StepMode) -> None:
        self._graph = graph
        self._spec = spec
        self._options = options
        self.mode: StepMode = mode
        self.num_tokens = options.max_num_tokens if mode == "mixed" else options.max_batch_size
        self.num_rows = max_rows(options) if mode == "mixed" else options.max_batch_size
        self.num_blocks = max_num_blocks(options, spec.num_kv_heads * spec.head_dim)

    @cached_property
    def input_ids(self) -> Tensor:
        return self._vector("input_ids", self.num_tokens)

    @cached_property
    def position_ids(self) -> Tensor:
        return self._vector("position_ids", self.num_tokens)

    @cached_property
    def logits_indices(self) -> Tensor:
        return self._vector("logits_indices", self.num_tokens)

    @cached_property
    def block_tables(self) -> Tensor:
        """[num_rows, blocks of the longest row]."""
        longest = max_blocks_per_sequence(self._options)
        maximum = (self.num_rows, longest)
        return self._dynamic("block_tables", (1, 1), (_half(self.num_rows), _half(longest)), maximum)

    @cached_property
    def update_order(self) -> Tensor:
        """[num_tokens]: the new tokens, sorted by the page that they are written to."""
        return self._vector("update_order", self.num_tokens)

    @cached_property
    def page_update_starts(self) -> Tensor:
        """[num_blocks + 1]: where each page's new tokens begin in ``update_order``."""
        count = self.num_blocks
        return self._dynamic("page_update_starts", (2,), (_half(count) + 1,), (count + 1,))

    @cached_property
    def page_write_offsets(self) -> Tensor:
        """[num_blocks]: place within the page of its first new token."""
        return self._vector("page_write_offsets", self.num_blocks)

    @cached_property
    def token_slots(self) -> Tensor:
        """[num_tokens]: page * tokens_per_block + place within the page, of each new token; for int8 pools alone."""
        return self._vector("token_slots", self.num_tokens)

    @cached_property
    def query_gather(self) -> Tensor:
        """[num_rows, most tokens of a row]: the token at each place; ``mixed`` alone."""
        tile = query_tile(self._options)
        return self._dynamic("query_gather", (1, 1), (_half(self.num_rows), _half(tile)), (self.num_rows, tile))

    @cached_property
    def query_scatter(self) -> Tensor:
        """[num_tokens]: the place of each token in ``query_gather``; ``mixed`` alone."""
        return self._vector("query_scatter", self.num_tokens)

    @cached_property
    def kv_lens(self) -> Tensor:
        """[num_rows]: tokens of each sequence, the new one included; ``decode`` alone."""
        return self._vector("kv_lens", self.num_rows)

    @cached_property
    def hidden_in(self) -> Tensor:
        """[num_tokens, hidden_size] of the network's dtype, from the pipeline stage before."""
        size = self._spec.hidden_size
        profile = (1, size), (_half(self.num_tokens), size), (self.num_tokens, size)
        return self._graph.input("hidden_in", self._graph.dtype, (-1, size), profile)

    def pool(self, name: str, dtype: ElementType, features: int) -> Tensor:
        """A KV pool [num_blocks, kv_heads, tokens_per_block, features], bound to the same memory as its output."""
        block = (self._spec.num_kv_heads, self._options.tokens_per_block, features)
        shapes = [(count, *block) for count in (1, _half(self.num_blocks), self.num_blocks)]
        return self._graph.input(name, dtype, (-1, *block), (shapes[0], shapes[1], shapes[2]))

    @cached_property
    def key_positions(self) -> Tensor:
        """[1, 1, 1, keys]: 0, 1, ... up to what the longest row's blocks hold."""
        graph, block = self._graph, self._options.tokens_per_block
        longest = max_blocks_per_sequence(self._options) * block
        count = graph.multiply(graph.size(self.block_tables, 1), graph.literal([block], "int64"))
        positions = graph.slice(graph.literal(np.arange(longest), "int32"), (0,), count)
        return graph.shuffle(positions, (1, 1, 1, -1))

    @cached_property
    def query_positions(self) -> Tensor:
        """[num_rows, 1, queries, 1]."""
        graph = self._graph
        if self.mode == "decode":
            return graph.shuffle(self.position_ids, (-1, 1, 1, 1))
        return graph.shuffle(graph.gather(self.position_ids, self.query_gather), (0, 1, -1, 1))

    def _vector(self, name: str, maximum: int) -> Tensor:
        return self._dynamic(name, (1,), (_half(maximum),), (maximum,))

    def _dynamic(self, name: str, low: tuple[int, ...], usual: tuple[int, ...], high: tuple[int, ...]) -> Tensor:
        return self._graph.input(name, "int32", (-1,) * len(low), (low, usual, high))


def _half(maximum: int) -> int:
    return (maximum + 1) // 2
