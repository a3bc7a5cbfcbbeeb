"""Quantize, dequantize and dynamic quantize, and constants of types that NumPy does not have."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_networks import Net, trt

from plansmith_errors import BuildError

RNG = np.random.default_rng(2)
FLOAT, HALF = trt.float32, trt.float16
few = settings(max_examples=20, deadline=None)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def e4m3(values):
    """By torch's cast, saturated as TensorRT does before it."""
    return torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn).float().numpy()


def quantize_dequantize(x, scale, dtype, axis=None):
    net = Net()
    tensor, scales = net.input("x", FLOAT, (-1, *x.shape[1:])), net.constant(scale)
    down = net.network.add_quantize(tensor, scales, dtype)
    up = net.network.add_dequantize(down.get_output(0), scales, FLOAT)
    if axis is not None:
        down.axis = up.axis = axis
    net.output(up)
    return net.run(x=x)


def test_int8_rounds_half_to_even_and_saturates():
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300, -128.5, -300]], np.float32)
    found = quantize_dequantize(x, np.array(1, np.float32), trt.int8)
    assert found.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128]]


@few
@given(st.integers(1, 5), st.floats(1e-3, 1e3))
def test_fp8_rounds_as_the_standard_does_and_saturates(rows, scale):
    x, scale = normal(rows, 40) * np.float32(300 * scale), np.array(scale, np.float32)
    np.testing.assert_array_equal(quantize_dequantize(x, scale, trt.fp8), e4m3(x / scale) * scale)


def test_scales_per_channel():
    x, scale = normal(5, 6), RNG.random(6).astype(np.float32) + 0.01
    found = quantize_dequantize(x, scale, trt.int8, axis=1)
    np.testing.assert_array_equal(found, np.clip(np.rint(x / scale), -128, 127) * scale)


@few
@given(st.sampled_from([(1, 64), (32, 1), (2, 64), (32, 2)]))
def test_int4_weights_have_scales_in_blocks(counts):
    values = RNG.integers(-8, 8, (32, 64)).astype(np.int8)
    nibbles = values.reshape(-1).astype(np.uint8) & 15
    scale = RNG.random(counts).astype(np.float16)
    net = Net()
    weight = net.raw(trt.int4, (32, 64), nibbles[0::2] | nibbles[1::2] << 4, "int4", "w")
    net.output(net.network.add_dequantize(weight, net.constant(scale), HALF))
    expected = values * np.kron(scale, np.ones((32 // counts[0], 64 // counts[1]), np.float32))
    np.testing.assert_array_equal(net.run(), expected.astype(np.float16))


def test_fp8_weights_have_scales_of_square_blocks():
    values, scale = normal(32, 64).astype(ml_dtypes.float8_e4m3fn), RNG.random((2, 4)).astype(np.float32)
    net = Net()
    weight = net.raw(trt.fp8, (32, 64), values.view(np.uint8), "fp8", "w")
    layer = net.network.add_dequantize(weight, net.constant(scale), FLOAT)
    layer.block_shape = (16, 16)
    net.output(layer)
    np.testing.assert_array_equal(net.run(), values.astype(np.float32) * np.kron(scale, np.ones((16, 16), np.float32)))


def test_bfloat16_and_fp8_constants_are_what_was_given():
    values = normal(3, 8)
    bf16, fp8 = values.astype(ml_dtypes.bfloat16), values.astype(ml_dtypes.float8_e4m3fn)
    net = Net()
    a = net.raw(trt.bfloat16, (3, 8), bf16.view(np.uint16), "bfloat16", "a")
    b = net.raw(trt.fp8, (3, 8), fp8.view(np.uint8), "fp8", "b")
    net.output(net.network.add_cast(a, FLOAT), name="bf16")
    net.output(net.network.add_dequantize(b, net.constant(np.array(2, np.float32)), FLOAT), name="fp8")
    found = net.run()
    assert np.array_equal(found["bf16"], bf16.astype(np.float32))
    assert np.array_equal(found["fp8"], fp8.astype(np.float32) * 2)


def dynamically_quantized(x, block, dtype, scale_dtype, double_scale=None):
    """The stored scales in float32, and what a dequantize makes of the blocks."""
    net = Net()
    layer = net.network.add_dynamic_quantize(net.input("x", FLOAT, (-1, x.shape[1])), 1, block, dtype, scale_dtype)
    scales = layer.get_output(1)
    if double_scale is not None:
        factor = net.constant(double_scale)
        layer.set_input(1, factor)
        scales = net.network.add_dequantize(scales, factor, FLOAT).get_output(0)
    net.output(net.network.add_dequantize(layer.get_output(0), scales, FLOAT))
    return net.run(x=x)


def test_mxfp8_scales_are_powers_of_two_rounded_up():
    x = normal(4, 64) * 100
    x[0, 0] = 500  # 500 / 448 lies above a power of two: rounded down, the scale would clip it
    found = dynamically_quantized(x, 32, trt.fp8, trt.DataType.E8M0)
    blocks = x.reshape(4, 2, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448))
    np.testing.assert_array_equal(found, (e4m3((blocks / scale).astype(np.float32)) * scale).reshape(4, 64))


def test_nvfp4_scales_are_fp8_under_a_scale_of_the_tensor():
    x, factor = normal(4, 64), np.array(0.004, np.float32)
    found = dynamically_quantized(x, 16, trt.fp4, trt.fp8, factor)
    blocks = x.reshape(4, 4, 16)
    scale = e4m3(np.abs(blocks).max(-1, keepdims=True) / (np.float32(6) * factor)) * factor
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    steps = grid[np.abs(np.abs(blocks / scale)[..., None] - grid).argmin(-1)] * np.sign(blocks)
    np.testing.assert_allclose(found, (steps * scale).reshape(4, 64), rtol=1e-6)


def test_a_constant_whose_bytes_are_not_known_is_named():
    net = Net()
    net.output(net.network.add_cast(net.raw(trt.bfloat16, (2,), np.zeros(2, np.uint16), "bfloat16", "w"), FLOAT))
    net.payloads.clear()
    with pytest.raises(BuildError, match=r"layer 'w' \(CONSTANT\): bytes of bfloat16 cannot be read back"):
        net.run()


def test_a_payload_that_is_not_what_the_network_holds_is_refused():
    net = Net()
    net.output(net.network.add_identity(net.constant(np.ones(3, np.float32), "w")))
    other = Net()
    other.raw(FLOAT, (3,), np.zeros(3, np.float32), "float32", "w")
    net.payloads = other.payloads
    with pytest.raises(BuildError, match="holds other bytes"):
        net.run()


def test_weights_beyond_the_cache_are_decoded_again_to_the_same_numbers():
    net = Net()
    weight = net.raw(trt.fp8, (8, 8), RNG.integers(0, 120, 64).astype(np.uint8), "fp8", "w")
    scaled = net.network.add_dequantize(weight, net.constant(np.array(0.5, np.float32)), FLOAT).get_output(0)
    none = trt.MatrixOperation.NONE
    net.output(net.network.add_matrix_multiply(net.input("x", FLOAT, (-1, 8)), none, scaled, none))
    x = normal(3, 8)
    cached, fresh = net.interpreter(), net.interpreter(cache_bytes=0)
    first = cached.run({"x": x})["y"]
    assert np.array_equal(first, cached.run({"x": x})["y"]) and np.array_equal(first, fresh.run({"x": x})["y"])


def test_external_weights_are_inputs_that_never_change():
    net = Net()
    x, weight = net.input("x", FLOAT, (-1, 4)), net.input("w", HALF, (4, 2))
    wide = net.network.add_cast(weight, FLOAT).get_output(0)
    none = trt.MatrixOperation.NONE
    net.output(net.network.add_matrix_multiply(x, none, wide, none))
    held, values, rows = Net(), normal(4, 2).astype(np.float16), normal(3, 4)
    held.raw(HALF, (4, 2), values, "float16", "w")
    interpreter = net.interpreter(external=held.payloads)
    assert interpreter.input_names == ["x"]
    np.testing.assert_allclose(interpreter.run({"x": rows})["y"], rows @ values.astype(np.float32), rtol=1e-5)
