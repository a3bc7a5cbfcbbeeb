"""Attention, its cache and rotary positions.

Formulas: TensorRT's operator pages Attention, KVCacheUpdate and RotaryEmbedding, and "Fused attention"
(docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/transformers-fused-attention.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.network.interpreter.reductions import softmax_over
from builder.network.interpreter.values import DTYPE_NAMES, Array, as_float, round_to


@dataclass(frozen=True)
class AttentionInputs:
    """What IAttentionInputLayer hands to IAttentionOutputLayer, in the order of its inputs."""

    query: Array  # [batch, num_heads, num_queries, head_dim], or packed [num_tokens, num_heads, head_dim]
    key: Array
    value: Array
    mask: Array | None = None  # bool: may attend; float: added to the products
    quantize_scale: Array | None = None
    query_lengths: Array | None = None  # cumulative [batch + 1], of a packed query
    key_value_lengths: Array | None = None  # [batch], or cumulative [batch + 1] where keys are packed


def attention_input(layer: Any, inputs: list[Array | None]) -> AttentionInputs:
    query, key, value, *others = (None if x is None else as_float(x) for x in inputs)
    if query is None or key is None or value is None:
        raise ValueError("lacks queries, keys or values")
    return AttentionInputs(query, key, value, *others)


def attention_output(layer: Any, inputs: list[AttentionInputs], dtype: str) -> Array:
    """Each sequence by itself: softmax(query @ key.T + mask) @ value, the probabilities rounded to ``dtype``.

    A query that may attend nothing gives NaN, so that a network that goes on to use it is found out.
    """
    (x,) = inputs
    attention = layer.attention
    packed = attention.query_form.name == "PACKED_NHD", attention.key_value_form.name == "PACKED_NHD"
    out = np.zeros((*x.query.shape[:-1], x.value.shape[-1]), np.float32)
    for index in range(_batch_size(x, packed[0])):
        queries, keys = _rows(x.query_lengths, index, packed[0]), _rows(x.key_value_lengths, index, packed[1])
        query = _sequence(x.query, queries, packed[0])
        key, value = (_sequence(tensor, keys, packed[1]) for tensor in (x.key, x.value))
        attended = _attend(attention, query, key, value, _mask_of(x.mask, index, key.shape[1]), x.quantize_scale, dtype)
        if packed[0]:
            out[queries] = attended.swapaxes(0, 1)
        else:
            out[index] = attended
    return out


def _batch_size(x: AttentionInputs, is_packed: bool) -> int:
    if not is_packed:
        return len(x.query)
    if x.query_lengths is None:
        raise ValueError("has packed queries without lengths")
    return len(x.query_lengths) - 1


def _rows(lengths: Array | None, index: int, is_packed: bool) -> Any:
    """What belongs to sequence ``index``: rows of a packed tensor, or (it, its first tokens) of a padded one."""
    if is_packed:
        if lengths is None:
            raise ValueError("has packed keys without lengths")
        return slice(int(lengths[index]), int(lengths[index + 1]))
    return index, slice(None), slice(None if lengths is None else int(lengths[index]))


def _sequence(tensor: Array, rows: Any, is_packed: bool) -> Array:
    """[num_heads, num_tokens, head_dim] of one sequence."""
    own: Array = tensor[rows]
    return own.swapaxes(0, 1) if is_packed else own


def _mask_of(mask: Array | None, index: int, num_keys: int) -> Array | None:
    return None if mask is None else mask[index if len(mask) > 1 else 0][..., :num_keys]


def _attend(
    attention: Any, query: Array, key: Array, value: Array, mask: Array | None, scale: Array | None, dtype: str
) -> Array:
    num_heads, num_queries, head_dim = query.shape
    grouped = query.reshape(len(key), -1, num_queries, head_dim)
    products = (grouped @ key[:, None].swapaxes(-1, -2)).reshape(num_heads, num_queries, -1)
    products = _masked(products, mask, attention.causal_kind.name)
    if attention.norm_op.name == "SOFTMAX":
        products = softmax_over(products, -1)
    products = _quantized(attention, products, scale) if scale is not None else round_to(dtype, products)
    attended: Array = products.reshape(len(key), -1, num_queries, products.shape[-1]) @ value[:, None]
    return attended.reshape(num_heads, num_queries, -1)


def _masked(products: Array, mask: Array | None, causal: str) -> Array:
    num_queries, num_keys = products.shape[-2:]
    if causal != "NONE":
        # LOWER_RIGHT: the last query sees the last key, as after a cache; UPPER_LEFT: the first sees the first.
        offset = num_keys - num_queries if causal == "LOWER_RIGHT" else 0
        visible = np.arange(num_keys) <= np.arange(num_queries)[:, None] + offset
        products = np.where(visible, products, np.float32(-np.inf))
    if mask is None:
        return products
    return np.where(mask, products, np.float32(-np.inf)) if mask.dtype == np.bool_ else products + mask


def _quantized(attention: Any, probabilities: Array, scale: Array) -> Array:
    dtype = DTYPE_NAMES[attention.normalization_quantize_to_type.name]
    steps = probabilities / scale
    return round_to(dtype, np.rint(steps) if dtype == "int8" else steps).astype(np.float32) * scale


def kv_cache_update(layer: Any, inputs: list[Array]) -> Array:
    """IKVCacheUpdateLayer: writes into the cache that was given, which is also what it returns.

    Tokens of row b go to positions write_indices[b] and on; what would lie past the row's end is dropped.
    """
    cache, update, write_indices, *lengths = inputs
    packed = layer.update_form.name == "PACKED_NHD"
    if layer.cache_mode.name != "LINEAR" or (packed and not lengths):
        raise ValueError(f"has mode {layer.cache_mode.name} and {'no' if not lengths else 'given'} lengths")
    update = update.astype(cache.dtype, copy=False)
    capacity = cache.shape[2]
    # Most rows of a paged cache get nothing in a step.
    rows = np.flatnonzero(np.diff(lengths[0])) if packed else range(len(write_indices))
    for row in rows:
        new = update[lengths[0][row] : lengths[0][row + 1]].swapaxes(0, 1) if packed else update[row]
        start = int(write_indices[row])
        end = min(start + new.shape[1], capacity)
        cache[row, :, start:end] = new[:, : max(end - start, 0)]
    return cache


def rotary_embedding(layer: Any, inputs: list[Array]) -> Array:
    """IRotaryEmbeddingLayer: x [batch, num_heads, num_tokens, head_dim], rotated in its first ``dim`` features."""
    x, cos, sin, *positions = inputs
    if positions:
        cos, sin = cos[positions[0]], sin[positions[0]]
    cos, sin = cos[:, None], sin[:, None]
    dim = layer.rotary_embedding_dim or x.shape[-1]
    first, second = _halves(layer.interleaved, dim)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def _halves(is_interleaved: bool, dim: int) -> tuple[slice, slice]:
    if is_interleaved:
        return slice(0, dim, 2), slice(1, dim, 2)
    return slice(0, dim // 2), slice(dim // 2, dim)
