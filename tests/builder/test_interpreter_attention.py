"""Attention, paged caches and rotary positions, against plain loops and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_networks import Net, trt

from plansmith_errors import BuildError

RNG = np.random.default_rng(3)
FLOAT, HALF, INT32, BOOL = trt.float32, trt.float16, trt.int32, trt.bool
PACKED, CAUSAL = trt.AttentionIOForm.PACKED_NHD, trt.CausalMaskKind
few = settings(max_examples=20, deadline=None)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def attended(q, k, v, allowed):
    """[heads, queries, dim] by torch, keys repeated for groups of heads."""
    group = len(q) // len(k)
    k, v = (torch.from_numpy(x).repeat_interleave(group, 0) for x in (k, v))
    mask = torch.from_numpy(np.broadcast_to(allowed, (len(q), q.shape[1], k.shape[1])).copy())
    return torch.nn.functional.scaled_dot_product_attention(torch.from_numpy(q), k, v, attn_mask=mask, scale=1).numpy()


def padded_attention(net, causal=CAUSAL.NONE, heads=4, kv_heads=2):
    q = net.input("q", FLOAT, (-1, heads, -1, 8))
    k, v = (net.input(name, FLOAT, (-1, kv_heads, -1, 8)) for name in "kv")
    return net.network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, causal)


@few
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 6), st.sampled_from([1, 2, 4]))
def test_the_last_query_sees_the_last_key(batch, queries, past, kv_heads):
    net = Net()
    layer = padded_attention(net, CAUSAL.LOWER_RIGHT, kv_heads=kv_heads)
    net.output(layer)
    q, k, v = (
        normal(batch, 4, queries, 8),
        normal(batch, kv_heads, past + queries, 8),
        normal(batch, kv_heads, past + queries, 8),
    )
    allowed = np.tril(np.ones((queries, past + queries), bool), past)
    expected = [attended(*sequence, allowed) for sequence in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(net.run(q=q, k=k, v=v), expected, rtol=1e-4, atol=1e-5)


def test_a_mask_says_who_may_attend():
    net = Net()
    layer = padded_attention(net)
    layer.mask = net.input("mask", BOOL, (-1, 1, -1, -1))
    net.output(layer)
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)
    mask = RNG.random((2, 1, 3, 5)) > 0.5
    mask[..., 0] = True
    expected = [attended(*sequence) for sequence in zip(q, k, v, mask, strict=True)]
    np.testing.assert_allclose(net.run(q=q, k=k, v=v, mask=mask), expected, rtol=1e-4, atol=1e-5)
    mask[1, 0, 2] = False
    assert np.isnan(net.run(q=q, k=k, v=v, mask=mask)[1, :, 2]).all(), "a query that sees nothing has no answer"


def test_keys_beyond_a_sequences_length_are_not_seen():
    net = Net()
    layer = padded_attention(net)
    layer.key_value_lengths = net.input("lengths", INT32, (-1,))
    net.output(layer)
    q, k, v, lengths = normal(3, 4, 1, 8), normal(3, 2, 6, 8), normal(3, 2, 6, 8), np.array([6, 1, 4], np.int32)
    found = net.run(q=q, k=k, v=v, lengths=lengths)
    for row, length in enumerate(lengths):
        expected = attended(q[row], k[row, :, :length], v[row, :, :length], np.True_)
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-5)


def test_packed_sequences_do_not_see_each_other():
    net = Net()
    q, k, v = (net.input(name, HALF, (-1, heads, 8)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    layer = net.network.add_attention_v2(q, k, v, trt.AttentionNormalizationOp.SOFTMAX, CAUSAL.LOWER_RIGHT)
    layer.query_form = layer.key_value_form = PACKED
    layer.query_lengths, layer.key_value_lengths = (net.input(name, INT32, (-1,)) for name in ("qs", "ks"))
    net.output(layer)
    qs, ks = np.array([0, 3, 4], np.int32), np.array([0, 3, 9], np.int32)
    arrays = {
        name: normal(rows, heads, 8).astype(np.float16) for name, rows, heads in (("q", 4, 4), ("k", 9, 2), ("v", 9, 2))
    }
    found = net.run(qs=qs, ks=ks, **arrays).astype(np.float32)
    wide = {name: array.astype(np.float32).swapaxes(0, 1) for name, array in arrays.items()}
    for (a, b), (c, d) in (((0, 3), (0, 3)), ((3, 4), (3, 9))):
        allowed = np.tril(np.ones((b - a, d - c), bool), d - c - b + a)
        expected = attended(wide["q"][:, a:b], wide["k"][:, c:d], wide["v"][:, c:d], allowed)
        np.testing.assert_allclose(found[a:b].swapaxes(0, 1), expected, atol=4e-3)


@pytest.mark.parametrize("dtype", [HALF, trt.bfloat16])
def test_a_paged_cache_is_written_where_it_lies(dtype):
    """Pages as rows of the cache: tokens sorted by page, how many each gets, and where in the page they begin."""
    net = Net()
    pool, update = net.input("key_pool.0", dtype, (-1, 2, 4, 8)), net.input("new", dtype, (-1, 2, 8))
    starts, offsets = net.input("starts", INT32, (-1,)), net.input("offsets", INT32, (-1,))
    layer = net.network.add_kv_cache_update(pool, update, offsets, trt.KVCacheMode.LINEAR)
    layer.update_form, layer.update_lengths = PACKED, starts
    net.output(layer, name="key_pool_out.0")
    memory = RNG.integers(0, 1 << 14, (5, 2, 4, 8)).astype(np.uint16)
    new = RNG.integers(0, 1 << 14, (4, 2, 8)).astype(np.uint16)
    if dtype == HALF:
        memory, new = memory.view(np.float16), new.view(np.float16)
    expected = memory.copy()
    expected[1, :, 3], expected[3, :, 1], expected[3, :, 2], expected[4, :, 3] = new
    feeds = {
        "key_pool.0": memory,
        "new": new,
        "starts": np.array([0, 0, 1, 1, 3, 4], np.int32),
        "offsets": np.array([0, 3, 0, 1, 3], np.int32),
    }
    output = net.interpreter().run(feeds)["key_pool_out.0"]
    assert np.shares_memory(output, memory) and memory.tobytes() == expected.tobytes()


def test_writes_past_the_end_of_a_row_are_dropped():
    net = Net()
    pool, update = net.input("pool", FLOAT, (-1, 1, 4, 2)), net.input("new", FLOAT, (-1, 1, 3, 2))
    where = net.input("where", INT32, (-1,))
    net.output(net.network.add_kv_cache_update(pool, update, where, trt.KVCacheMode.LINEAR))
    memory, new = np.zeros((2, 1, 4, 2), np.float32), normal(2, 1, 3, 2)
    net.run(pool=memory, new=new, where=np.array([0, 3], np.int32))
    assert np.array_equal(memory[0, 0, :3], new[0, 0]) and np.array_equal(memory[1, 0, 3], new[1, 0, 0])
    assert not memory[1, 0, :3].any()


def test_a_pool_that_is_written_by_scatter_is_changed_too():
    net = Net()
    pool, update = net.input("key_pool.7", trt.int8, (-1, 4)), net.input("new", trt.int8, (-1, 4))
    layer = net.network.add_scatter(pool, net.input("slots", INT32, (-1, 1)), update, trt.ScatterMode.ND)
    net.output(layer, name="key_pool_out.7")
    memory, new = np.zeros((6, 4), np.int8), np.ones((1, 4), np.int8)
    net.interpreter().run({"key_pool.7": memory, "new": new, "slots": np.array([[2]], np.int32)})
    assert memory[2].all() and memory.sum() == 4


@few
@given(st.booleans(), st.sampled_from([0, 4, 8]), st.integers(1, 5))
def test_rotary_positions(interleaved, dim, tokens):
    net = Net()
    rotated = dim or 8
    angles = RNG.random((20, rotated // 2)).astype(np.float32) * 6
    x = net.input("x", FLOAT, (-1, 3, 1, 8))
    tables = [net.constant(np.cos(angles)), net.constant(np.sin(angles))]
    layer = net.network.add_rotary_embedding(x, *tables, interleaved, dim)
    layer.set_input(3, net.input("positions", INT32, (-1, 1)))
    net.output(layer)
    values, positions = normal(tokens, 3, 1, 8), RNG.integers(0, 20, (tokens, 1)).astype(np.int32)
    found = net.run(x=values, positions=positions)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2) for i in range(rotated // 2)]
    expected = values.astype(np.complex64)
    for index, (a, b) in enumerate(pairs):  # a rotation is a product of complex numbers
        turn = np.exp(1j * angles[positions, index])[:, None]
        product = (values[..., a] + 1j * values[..., b]) * turn
        expected[..., a], expected[..., b] = product.real, product.imag
    np.testing.assert_allclose(found, expected.real, rtol=1e-4, atol=1e-5)


def test_a_cache_of_another_shape_is_refused():
    net = Net()
    pool, update = net.input("pool", FLOAT, (-1, 1, 4, 2)), net.input("new", FLOAT, (-1, 1, 3, 2))
    layer = net.network.add_kv_cache_update(pool, update, net.input("where", INT32, (-1,)), trt.KVCacheMode.LINEAR)
    net.output(layer)
    with pytest.raises(BuildError, match=r"KV_CACHE_UPDATE"):
        net.run(pool=np.zeros((1, 1, 4, 2), np.float32), new=normal(1, 1, 3, 2), where=np.zeros(2, np.int32))
