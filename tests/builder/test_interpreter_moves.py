"""Layers that move values: shapes, slices, gathers and scatters, fixed and dynamic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_networks import Net, trt

from plansmith_errors import BuildError

RNG = np.random.default_rng(1)
FLOAT, HALF, INT32 = trt.float32, trt.float16, trt.int32
few = settings(max_examples=25, deadline=None)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@few
@given(st.integers(1, 6), st.permutations([0, 1, 2]), st.permutations([0, 1, 2, 3]))
def test_shuffle_transposes_reshapes_and_transposes(tokens, first, second):
    net = Net()
    layer = net.network.add_shuffle(net.input("x", HALF, (-1, 4, 6)))
    layer.first_transpose = trt.Permutation(first)
    middle = [np.array(["t", 4, 6], object)[axis] for axis in first]
    sizes = [0 if size == "t" else size for size in middle]
    split = sizes.index(6)
    layer.reshape_dims = (*sizes[:split], 2, 3, *sizes[split + 1 :]) if split >= sizes.index(0) else (-1, 4, 2, 3)
    if split < sizes.index(0):
        return  # a placeholder after a split axis would copy another size
    layer.second_transpose = trt.Permutation(second)
    net.output(layer)
    x = normal(tokens, 4, 6, dtype=np.float16)
    moved = x.transpose(first)
    expected = moved.reshape(*moved.shape[:split], 2, 3, *moved.shape[split + 1 :]).transpose(second)
    assert np.array_equal(net.run(x=x), expected)


def test_shuffle_takes_its_sizes_from_a_tensor():
    net = Net()
    x, like = net.input("x", FLOAT, (-1, 6)), net.input("like", FLOAT, (-1, 2, 3))
    layer = net.network.add_shuffle(x)
    layer.set_input(1, net.network.add_shape(like).get_output(0))
    net.output(layer)
    values = normal(5, 6)
    assert np.array_equal(net.run(x=values, like=normal(5, 2, 3)), values.reshape(5, 2, 3))


def test_unsqueeze_and_squeeze():
    net = Net()
    wide = net.network.add_unsqueeze(net.input("x", HALF, (-1, 3)), net.constant(np.array([1, 3], np.int32)))
    narrow = net.network.add_squeeze(wide.get_output(0), net.constant(np.array([3], np.int32)))
    net.output(narrow)
    x = normal(4, 3, dtype=np.float16)
    assert np.array_equal(net.run(x=x), x[:, None])


def test_concatenation_of_a_stored_and_a_computed_tensor():
    net = Net()
    x = net.input("x", HALF, (-1, 3))
    doubled = net.network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0)
    layer = net.network.add_concatenation([x, doubled])
    layer.axis = 1
    net.output(layer)
    values = normal(2, 3, dtype=np.float16)
    found = net.run(x=values)
    assert found.dtype == np.float16 and np.array_equal(found, np.concatenate([values, values + values], 1))


@few
@given(st.integers(0, 2), st.integers(1, 4), st.integers(1, 2))
def test_slices_with_fixed_bounds(start, size, stride):
    net = Net()
    net.output(net.network.add_slice(net.input("x", FLOAT, (10, 2)), (start, 0), (size, 2), (stride, 1)))
    x = normal(10, 2)
    assert np.array_equal(net.run(x=x), x[start : start + size * stride : stride])


def test_slices_whose_size_is_known_when_they_run():
    net = Net()
    x, other = net.input("x", FLOAT, (-1, 4)), net.input("other", FLOAT, (-1, 4))
    layer = net.network.add_slice(x, (1, 0), (0, 0), (1, 1))
    layer.set_input(2, net.network.add_shape(other).get_output(0))
    net.output(layer)
    values = normal(8, 4)
    assert np.array_equal(net.run(x=values, other=normal(5, 4)), values[1:6])


def test_a_slice_outside_its_input_is_refused_unless_it_fills():
    net = Net()
    layer = net.network.add_slice(net.input("x", FLOAT, (-1,)), (2,), (4,), (1,))
    net.output(layer)
    with pytest.raises(BuildError, match=r"reads 2..5 of axis 0, which has 4 elements"):
        net.run(x=normal(4))
    layer.mode = trt.SampleMode.FILL
    layer.set_input(4, net.constant(np.array(7, np.float32)))
    assert net.run(x=np.arange(4, dtype=np.float32)).tolist() == [2, 3, 7, 7]


def test_gather_takes_rows_as_an_embedding_does():
    net = Net()
    net.output(net.network.add_gather(net.input("x", HALF, (-1, 3)), net.input("i", INT32, (-1, -1)), 0))
    x, i = normal(7, 3, dtype=np.float16), RNG.integers(0, 7, (2, 5)).astype(np.int32)
    assert np.array_equal(net.run(x=x, i=i), x[i])


def test_gather_of_elements_and_of_coordinates():
    x, i = normal(4, 5), RNG.integers(0, 5, (4, 2)).astype(np.int32)
    net = Net()
    layer = net.network.add_gather_v2(
        net.input("x", FLOAT, (-1, 5)), net.input("i", INT32, (-1, 2)), trt.GatherMode.ELEMENT
    )
    layer.axis = 1
    net.output(layer)
    assert np.array_equal(net.run(x=x, i=i), [[x[row, column] for column in i[row]] for row in range(4)])
    net = Net()
    layer = net.network.add_gather_v2(net.input("x", FLOAT, (-1, 5)), net.input("i", INT32, (-1, 2)), trt.GatherMode.ND)
    net.output(layer)
    pairs = np.stack([RNG.integers(0, 4, 6), RNG.integers(0, 5, 6)], -1).astype(np.int32)
    assert np.array_equal(net.run(x=x, i=pairs), [x[row, column] for row, column in pairs])


def test_gather_with_a_batch_dimension():
    net = Net()
    layer = net.network.add_gather(net.input("x", FLOAT, (-1, 5, 2)), net.input("i", INT32, (-1, 3)), 1)
    layer.num_elementwise_dims = 1
    net.output(layer)
    x, i = normal(4, 5, 2), RNG.integers(0, 5, (4, 3)).astype(np.int32)
    assert np.array_equal(net.run(x=x, i=i), [x[row][i[row]] for row in range(4)])


def test_scatter_writes_rows_and_leaves_its_input():
    net = Net()
    tensors = net.input("x", HALF, (-1, 3)), net.input("i", INT32, (-1, 1)), net.input("u", HALF, (-1, 3))
    net.output(net.network.add_scatter(*tensors, trt.ScatterMode.ND))
    x, updates = normal(6, 3, dtype=np.float16), normal(2, 3, dtype=np.float16)
    before = x.copy()
    found = net.run(x=x, i=np.array([[4], [1]], np.int32), u=updates)
    assert np.array_equal(found[[4, 1]], updates) and np.array_equal(x, before)
    assert np.array_equal(np.delete(found, [4, 1], 0), np.delete(x, [4, 1], 0))


def test_scatter_of_elements_and_one_hot_make_the_same_shares():
    x, i, u = np.zeros((4, 6), np.float32), RNG.permuted(np.tile(np.arange(6), (4, 1)), axis=1)[:, :2], normal(4, 2)
    net = Net()
    tensors = net.input("x", FLOAT, (-1, 6)), net.input("i", INT32, (-1, 2)), net.input("u", FLOAT, (-1, 2))
    layer = net.network.add_scatter(*tensors, trt.ScatterMode.ELEMENT)
    layer.axis = 1
    net.output(layer)
    scattered = net.run(x=x, i=i.astype(np.int32), u=u)
    net = Net()
    values, depth = net.constant(np.array([0, 1], np.float32)), net.constant(np.array(6, np.int32))
    net.output(net.network.add_one_hot(net.input("i", INT32, (-1, 2)), values, depth, 2))
    hot = net.run(i=i.astype(np.int32))
    np.testing.assert_array_equal(scattered, (hot * u[..., None]).sum(1))
