"""Pools of keys and values in the network's own dtype, written in place."""

from __future__ import annotations

from typing import Protocol

from builder.targets.tensorrt.graph import Graph, Tensor
from builder.targets.tensorrt.inputs import StepTensors


class KvPools(Protocol):
    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write the new tokens' [num_tokens, kv_heads, head_dim]; return all of each row's keys and values.

        Both are [num_rows, kv_heads, keys, head_dim] of the network's dtype; ``layer`` is its number in the model.
        """
        ...


class FloatPools:
    """``key_pool.N`` and ``value_pool.N``; outputs ``key_pool_out.N`` and ``value_pool_out.N`` of the same memory."""

    def __init__(self, graph: Graph, step: StepTensors) -> None:
        self._graph = graph
        self._step = step

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            gather_pages(self._graph, self._step, update_in_place(self._graph, self._step, name, new, layer))
            for name, new in (("key_pool", k), ("value_pool", v))
        )
        return keys, values


def update_in_place(graph: Graph, step: StepTensors, name: str, new: Tensor, layer: int) -> Tensor:
    """Write ``new`` [num_tokens, kv_heads, features] to the pool ``name``.N; return the pool.

    Writes outside a page are ignored; nothing else of the pool changes.
    """
    trt = graph.trt
    pool = step.pool(f"{name}.{layer}", graph.float_type(new), new.shape[2])
    sorted_new = graph.gather(new, step.update_order)
    update = graph.added(
        graph.network.add_kv_cache_update(pool, sorted_new, step.page_write_offsets, trt.KVCacheMode.LINEAR),
        f"model.layers.{layer}.self_attn:{name}",
    )
    update.update_form = trt.AttentionIOForm.PACKED_NHD
    graph.set_checked(update, "update_lengths", step.page_update_starts)
    graph.output(update.get_output(0), f"{name}_out.{layer}")
    return update.get_output(0)


def gather_pages(graph: Graph, step: StepTensors, pool: Tensor) -> Tensor:
    """[num_blocks, kv_heads, tokens_per_block, features] to each row's [num_rows, kv_heads, keys, features]."""
    pages = graph.gather(pool, step.block_tables)
    return graph.shuffle(pages, (0, 0, -1, pool.shape[3]), first=(0, 2, 1, 3, 4))
