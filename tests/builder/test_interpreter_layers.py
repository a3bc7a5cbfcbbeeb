"""Each layer type that a decoder needs, against a formula written another way."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_networks import Net, trt

from plansmith_errors import BuildError

RNG = np.random.default_rng(0)
HALF, FLOAT, INT32, BOOL = trt.float16, trt.float32, trt.int32, trt.bool
few = settings(max_examples=25, deadline=None)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("SUM", lambda a, b: a + b),
        ("DIV", lambda a, b: a / b),
        ("POW", lambda a, b: a**b),
        ("FLOOR_DIV", lambda a, b: np.floor(a / b)),
        ("MIN", np.minimum),
        ("GREATER", lambda a, b: a > b),
    ],
)
def test_elementwise_broadcasts(operation, expected):
    net = Net()
    a, b = net.input("a", FLOAT, (-1, 5)), net.input("b", FLOAT, (1, 5))
    net.output(net.network.add_elementwise(a, b, getattr(trt.ElementWiseOperation, operation)))
    x, y = np.abs(normal(3, 5)) + 0.1, np.abs(normal(1, 5)) + 0.1
    np.testing.assert_allclose(net.run(a=x, b=y), expected(x, y), rtol=1e-6)


def test_integers_divide_as_in_c_and_floor_by_name():
    for operation, expected in (("DIV", [-3, 3, 0]), ("FLOOR_DIV", [-4, 3, -1])):
        net = Net()
        tensors = [net.input(name, INT32, (3,)) for name in "ab"]
        net.output(net.network.add_elementwise(*tensors, getattr(trt.ElementWiseOperation, operation)))
        found = net.run(a=np.array([-7, 7, -1], np.int32), b=np.array([2, 2, 2], np.int32))
        assert found.dtype == np.int32 and found.tolist() == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("SIGMOID", torch.sigmoid),
        ("TANH", torch.tanh),
        ("GELU_TANH", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("GELU_ERF", torch.nn.functional.gelu),
        ("RELU", torch.relu),
    ],
)
def test_activations_are_rounded_to_the_layers_type(kind, expected):
    x = normal(200, dtype=np.float16)
    net = Net()
    net.output(net.network.add_activation(net.input("x", HALF, (-1,)), getattr(trt.ActivationType, kind)))
    found = net.run(x=x)
    exact = expected(torch.from_numpy(x.astype(np.float32))).numpy()
    assert found.dtype == np.float16
    # Within a half unit of float16, and a little for float32 on both sides.
    assert np.all(np.abs(found - exact) <= np.spacing(np.abs(found)).astype(np.float32) * 0.51 + 1e-7)


@pytest.mark.parametrize("name", ["EXP", "SQRT", "RECIP", "COS", "SIN", "ERF", "NEG", "LOG", "ROUND"])
def test_unary(name):
    functions = {"RECIP": lambda x: 1 / x, "NEG": lambda x: -x, "ERF": np.vectorize(math.erf), "ROUND": np.round}
    x = np.abs(normal(4, 6)) + 0.5
    net = Net()
    net.output(net.network.add_unary(net.input("x", FLOAT, (4, -1)), getattr(trt.UnaryOperation, name)))
    np.testing.assert_allclose(net.run(x=x), functions.get(name, getattr(np, name.lower(), None))(x), rtol=2e-6)


@few
@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from(["SUM", "AVG", "MAX"]), st.booleans())
def test_reduce_over_masked_axes(rows, columns, operation, keep):
    net = Net()
    x = net.input("x", FLOAT, (-1, -1, 3))
    net.output(net.network.add_reduce(x, getattr(trt.ReduceOperation, operation), 0b101, keep))
    values = normal(rows, columns, 3)
    expected = {"SUM": np.sum, "AVG": np.mean, "MAX": np.max}[operation](values, axis=(0, 2), keepdims=keep)
    np.testing.assert_allclose(net.run(x=values), expected, rtol=1e-5, atol=1e-6)


def test_softmax_of_large_values_does_not_overflow():
    net = Net()
    layer = net.network.add_softmax(net.input("x", HALF, (-1, 9)))
    layer.axes = 0b10
    net.output(layer)
    x = (normal(4, 9) * 1e4).astype(np.float16)
    expected = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    np.testing.assert_allclose(net.run(x=x), expected, atol=5e-4)


@few
@given(st.booleans(), st.booleans(), st.integers(0, 1))
def test_cumulative_sums_count_tokens_before(exclusive, reverse, axis):
    net = Net()
    x = net.input("x", INT32, (-1, 4))
    where = net.constant(np.array(axis, np.int32))
    net.output(net.network.add_cumulative(x, where, trt.CumulativeOperation.SUM, exclusive, reverse))
    values = RNG.integers(-5, 5, (3, 4)).astype(np.int32)
    found, size = net.run(x=values), values.shape[axis]
    for index in range(size):
        first, last = (index + exclusive, size) if reverse else (0, index + (not exclusive))
        expected = np.take(values, range(first, last), axis).sum(axis)
        assert np.array_equal(np.take(found, index, axis), expected)


def test_top_k_gives_values_and_indices():
    net = Net()
    layer = net.network.add_topk(net.input("x", FLOAT, (-1, 8)), trt.TopKOperation.MAX, 3, 0b10)
    net.output(layer, 0, "values")
    net.output(layer, 1, "indices")
    x = normal(5, 8)
    found = net.run(x=x)
    values, indices = torch.from_numpy(x).topk(3)
    assert np.array_equal(found["values"], values) and np.array_equal(found["indices"], indices)


def test_normalization_is_layer_norm():
    net = Net()
    scale, bias = normal(1, 6), normal(1, 6)
    tensors = [net.constant(scale), net.constant(bias)]
    layer = net.network.add_normalization_v2(net.input("x", FLOAT, (-1, 6)), *tensors, 0b10)
    net.output(layer)
    x = normal(4, 6)
    expected = torch.nn.functional.layer_norm(
        *map(torch.from_numpy, (x,)), (6,), *map(torch.from_numpy, (scale[0], bias[0]))
    )
    np.testing.assert_allclose(net.run(x=x), expected, atol=1e-5)


@few
@given(st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())
def test_matrix_products_broadcast_and_transpose(batch, rows, left, right):
    none, transpose = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
    net = Net()
    a, b = net.input("a", FLOAT, (-1, -1, -1)), net.input("b", FLOAT, (1, -1, -1))
    net.output(net.network.add_matrix_multiply(a, transpose if left else none, b, transpose if right else none))
    x, y = normal(batch, rows, 6), normal(1, 6, 3)
    given_x, given_y = x.swapaxes(1, 2) if left else x, y.swapaxes(1, 2) if right else y
    np.testing.assert_allclose(net.run(a=given_x, b=given_y), np.einsum("bij,kjl->bil", x, y), rtol=1e-4, atol=1e-5)


def test_matrix_times_vector():
    net = Net()
    a, b = net.input("a", FLOAT, (-1, 4, 6)), net.input("b", FLOAT, (1, 6))
    net.output(net.network.add_matrix_multiply(a, trt.MatrixOperation.NONE, b, trt.MatrixOperation.VECTOR))
    x, y = normal(2, 4, 6), normal(1, 6)
    np.testing.assert_allclose(net.run(a=x, b=y), x @ y[0], rtol=1e-5, atol=1e-6)


def test_einsum():
    net = Net()
    tensors = [net.input("a", FLOAT, (-1, 3, 4)), net.input("b", FLOAT, (-1, 4))]
    net.output(net.network.add_einsum(tensors, "tec,tc->te"))
    x, y = normal(5, 3, 4), normal(5, 4)
    np.testing.assert_allclose(net.run(a=x, b=y), (x * y[:, None]).sum(-1), rtol=1e-5, atol=1e-6)


def test_casts_round_floats_to_nearest_and_cut_integers():
    for dtype, expected in ((HALF, [2048, 2052, -1.5]), (INT32, [2049, 2051, -1]), (BOOL, [True, True, True])):
        net = Net()
        net.output(net.network.add_cast(net.input("x", FLOAT, (3,)), dtype))
        assert net.run(x=np.array([2049, 2051, -1.5], np.float32)).tolist() == expected


@pytest.mark.parametrize(("dtype", "torch_dtype"), [(HALF, torch.float16), (trt.bfloat16, torch.bfloat16)])
def test_each_layer_rounds_before_the_next(dtype, torch_dtype):
    net = Net()
    x = net.input("x", dtype, (-1,))
    total = net.network.add_elementwise(x, x, trt.ElementWiseOperation.PROD).get_output(0)
    wide = net.network.add_cast(total, FLOAT).get_output(0)
    net.output(net.network.add_elementwise(wide, wide, trt.ElementWiseOperation.PROD))
    values = torch.randn(100).to(torch_dtype)
    stored = values.numpy() if dtype == HALF else values.view(torch.uint16).numpy()
    expected = (values * values).float() ** 2
    np.testing.assert_array_equal(net.run(x=stored), expected.numpy())


def test_bfloat16_goes_in_and_out_as_it_is_stored():
    net = Net()
    x = net.input("x", trt.bfloat16, (-1,))
    net.output(net.network.add_elementwise(x, x, trt.ElementWiseOperation.SUM))
    values = torch.randn(50).to(torch.bfloat16)
    found = net.run(x=values.view(torch.uint16).numpy())
    assert np.array_equal(found.astype(np.float32), (values + values).float().numpy())


def test_select_keeps_what_the_mask_allows():
    net = Net()
    mask, x = net.input("mask", BOOL, (-1, 4)), net.input("x", HALF, (-1, 4))
    net.output(net.network.add_select(mask, x, net.constant(np.full((1, 4), -np.inf, np.float16))))
    keep, values = RNG.random((3, 4)) > 0.5, normal(3, 4, dtype=np.float16)
    assert np.array_equal(net.run(mask=keep, x=values), np.where(keep, values, -np.inf))


def test_fill_counts_along_an_axis():
    net = Net()
    layer = net.network.add_fill((1,), trt.FillOperation.LINSPACE, INT32)
    shape = net.network.add_shape(net.input("x", FLOAT, (-1,)))
    layer.set_input(0, shape.get_output(0))
    layer.set_input(1, net.constant(np.array(3, np.int32)))
    layer.set_input(2, net.constant(np.array([2], np.int32)))
    net.output(layer)
    assert net.run(x=normal(4)).tolist() == [3, 5, 7, 9]


def test_an_unknown_layer_is_named():
    net = Net()
    layer = net.network.add_lrn(net.input("x", FLOAT, (1, 3, 4, 4)), 3, 1.0, 1.0, 1.0)
    layer.name = "odd one"
    with pytest.raises(BuildError, match=r"layer 'odd one' is of type LRN.*matrix_multiply"):
        net.interpreter()


def test_what_cannot_be_computed_names_the_layer_and_its_inputs():
    net = Net()
    layer = net.network.add_gather(net.input("table", FLOAT, (4, 2)), net.input("ids", INT32, (-1,)), 0)
    layer.name = "embed"
    net.output(layer)
    with pytest.raises(BuildError, match=r"layer 'embed' \(GATHER\): has indices 0..4 into an axis of 4 .*int32 \[2\]"):
        net.run(table=normal(4, 2), ids=np.array([0, 4], np.int32))
    with pytest.raises(BuildError, match=r"has indices -1..0"):
        net.run(table=normal(4, 2), ids=np.array([0, -1], np.int32))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x' was not given"),
        ({"x": normal(2, 3)}, r"'x' is float32, expected float16"),
        (
            {"x": normal(2, 4, dtype=np.float16)},
            r"came out as float16 \[2, 4\]; the network declares float16 \[-1, 3\]",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(feeds, message):
    net = Net()
    net.output(net.network.add_identity(net.input("x", HALF, (-1, 3))))
    with pytest.raises(BuildError, match=message):
        net.run(**feeds)
