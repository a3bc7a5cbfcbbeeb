"""The network inputs of one step. Each is made when it is first used, so that a network has what it needs alone."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from builder.model_spec import ModelSpec
from builder.targets.tensorrt.graph import Graph, Profile, Tensor
from builder.targets.tensorrt.options import NetworkOptions, StepMode
from builder.targets.tensorrt.payload import ElementType
from builder.targets.tensorrt.shapes import max_blocks_per_sequence, max_num_blocks, max_rows, query_tile


class _Most(NamedTuple):
    """The largest sizes of a mode."""

    tokens: int
    rows: int
    queries: int  # of a row


class StepTensors:
    """int32 unless said otherwise; see ``step_feeds`` for what they hold.

    One network serves both modes, with an optimization profile for each. A row is a sequence, or at most
    ``query_tile`` tokens of one; in ``decode`` each has one query.
    """

    def __init__(self, graph: Graph, spec: ModelSpec, options: NetworkOptions) -> None:
        self._graph = graph
        self._spec = spec
        self._options = options
        batch = min(options.max_batch_size, options.max_num_tokens)
        self._most: dict[StepMode, _Most] = {
            "mixed": _Most(options.max_num_tokens, max_rows(options), query_tile(options)),
            "decode": _Most(batch, batch, 1),
        }
        self._num_blocks = max_num_blocks(options, spec.num_kv_heads * spec.head_dim)

    @property
    def tokens_per_block(self) -> int:
        return self._options.tokens_per_block

    @cached_property
    def input_ids(self) -> Tensor:
        return self._per_token("input_ids")

    @cached_property
    def position_ids(self) -> Tensor:
        return self._per_token("position_ids")

    @cached_property
    def logits_indices(self) -> Tensor:
        return self._per_token("logits_indices")

    @cached_property
    def block_tables(self) -> Tensor:
        """[num_rows, blocks of the longest row]."""
        longest = max_blocks_per_sequence(self._options)
        return self._input("block_tables", {mode: (most.rows, longest) for mode, most in self._most.items()})

    @cached_property
    def update_order(self) -> Tensor:
        """[num_tokens]: the new tokens, sorted by the page that they are written to."""
        return self._per_token("update_order")

    @cached_property
    def page_update_starts(self) -> Tensor:
        """[num_blocks + 1]: where each page's new tokens begin in ``update_order``."""
        return self._input("page_update_starts", dict.fromkeys(self._most, (self._num_blocks + 1,)), lowest=2)

    @cached_property
    def page_write_offsets(self) -> Tensor:
        """[num_blocks]: place within the page of its first new token."""
        return self._input("page_write_offsets", dict.fromkeys(self._most, (self._num_blocks,)))

    @cached_property
    def token_slots(self) -> Tensor:
        """[num_tokens]: page * tokens_per_block + place within the page, of each new token; for int8 pools alone."""
        return self._per_token("token_slots")

    @cached_property
    def query_gather(self) -> Tensor:
        """[num_rows, most tokens of a row]: the token at each place."""
        return self._input("query_gather", {mode: (most.rows, most.queries) for mode, most in self._most.items()})

    @cached_property
    def query_scatter(self) -> Tensor:
        """[num_tokens]: the place of each token in ``query_gather``."""
        return self._per_token("query_scatter")

    @cached_property
    def hidden_in(self) -> Tensor:
        """[num_tokens, hidden_size] of the network's dtype, from the pipeline stage before."""
        size = self._spec.hidden_size
        profiles: dict[StepMode, Profile] = {
            mode: ((1, size), (_half(most.tokens), size), (most.tokens, size)) for mode, most in self._most.items()
        }
        return self._graph.input("hidden_in", self._graph.dtype, (-1, size), profiles)

    def pool(self, name: str, dtype: ElementType, features: int) -> Tensor:
        """A KV pool [num_blocks, kv_heads, tokens_per_block, features], bound to the same memory as its output."""
        block = (self._spec.num_kv_heads, self._options.tokens_per_block, features)
        low, usual, high = ((count, *block) for count in (1, _half(self._num_blocks), self._num_blocks))
        return self._graph.input(name, dtype, (-1, *block), dict.fromkeys(self._most, (low, usual, high)))

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
        return self._graph.shuffle(self._graph.gather(self.position_ids, self.query_gather), (0, 1, -1, 1))

    def _per_token(self, name: str) -> Tensor:
        return self._input(name, {mode: (most.tokens,) for mode, most in self._most.items()})

    def _input(self, name: str, highest: dict[StepMode, tuple[int, ...]], lowest: int = 1) -> Tensor:
        profiles: dict[StepMode, Profile] = {
            mode: (tuple(min(lowest, size) for size in high), tuple(map(_half, high)), high)
            for mode, high in highest.items()
        }
        return self._graph.input(name, "int32", (-1,) * len(highest["mixed"]), profiles)


def _half(maximum: int) -> int:
    return (maximum + 1) // 2
