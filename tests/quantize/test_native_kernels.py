"""The compiled kernels store the bytes that NumPy stores: for every scheme, type of source, shape and kind of value."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize.block_rounding import MX_WAYS, NVFP4_NEIGHBOURS, nvfp4_tensor_scale, round_mxfp4, round_mxfp8, round_nvfp4
from quantize.native import casts, library, products
from quantize.native.kernels import DamagedRowError, Kernels
from quantize.rounding import MSE_FACTORS, round_fp8, round_fp8_band, round_int4, round_int8, smallest_factor

with pytest.MonkeyPatch.context() as patch:
    patch.delenv(library.SWITCH, raising=False)  # the suite may run without them, these tests need them
    LIBRARY = library.native_library.__wrapped__()
KERNELS = LIBRARY and Kernels(LIBRARY)
TYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def test_the_kernels_were_built():
    """Without a compiler an installation goes on; the tests of the kernels must not then pass by doing nothing."""
    assert KERNELS is not None


@st.composite
def sources(draw, multiple=1):
    """Rows of every type and of wild values: subnormal, huge, negative zeros, whole groups of zeros."""
    dtype = draw(st.sampled_from(TYPES))
    shape = (draw(st.integers(1, 40)), multiple * draw(st.integers(1, 6)))
    limit = float(ml_dtypes.finfo(dtype).max)
    values = st.one_of(
        st.floats(-1, 1, width=32),
        st.floats(-limit, limit, width=32),
        st.sampled_from([0.0, -0.0, 1e-40, -1e-30, 448.0, 464.0, 0.25, 1.25, 2.5, 5.0, 6.5]),
    )
    few = np.array(draw(st.lists(values, min_size=8, max_size=8)), np.float32)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = np.where(rng.random(shape) < 0.3, rng.choice(few, shape), rng.standard_normal(shape) * draw(st.floats(0, 3)))
    rows[:, : multiple // 2 * draw(st.integers(0, 1))] = -0.0
    with np.errstate(over="ignore"):
        rows = rows.astype(np.float32).astype(dtype)
    return np.where(np.isfinite(rows), rows, dtype.type(1))


def same(native, expected):
    """The stored bytes are equal; sums of squares are, to the digits that any order of adding leaves."""
    if expected is None:
        assert native is None
        return
    rounded, norm = native
    for found, wanted in (
        (rounded.values, expected.values),
        (rounded.scales, expected.scales),
        (rounded.zero_points, expected.zero_points),
    ):
        if wanted is None:
            assert found is None
        else:
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    assert rounded.squared_error == pytest.approx(expected.squared_error, rel=1e-9)
    assert norm >= 0


def wide(source):
    return source.astype(np.float32)


@given(sources())
def test_fp8_and_int8_by_row(source):
    same(KERNELS.fp8(source, None), round_fp8(wide(source)))
    same(KERNELS.int8(source), round_int8(wide(source)))


@given(sources(), st.floats(2**-20, 2**20, width=32))
def test_fp8_with_one_scale_for_the_tensor(source, scale):
    native, _ = KERNELS.fp8(source, np.float32(scale))
    with np.errstate(over="ignore"):  # a scale far too small: values saturate in both
        expected = round_fp8(wide(source), np.full((1, 1), scale, np.float32))
    assert native.values.tobytes() == expected.values.tobytes()


@given(sources(multiple=50))
def test_fp8_in_blocks_whose_last_may_be_narrower(source):
    same(KERNELS.fp8_band(source), round_fp8_band(wide(source)))


@settings(max_examples=200)
@given(
    sources(multiple=32), st.booleans(), st.sampled_from(["absmax", "mse"]), st.sampled_from([np.float16, np.float32])
)
def test_int4(source, symmetric, scale, scale_dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = round_int4(wide(source), 32, symmetric=symmetric, scale=scale, scale_dtype=scale_dtype)
    native = KERNELS.int4(
        source,
        32,
        symmetric=symmetric,
        factors=MSE_FACTORS if scale == "mse" else (1.0,),
        smallest=smallest_factor(scale),
        scale_dtype=scale_dtype,
    )
    same(native, expected)


@given(sources(multiple=16), st.sampled_from(["absmax", "four-over-six", "mse"]))
def test_nvfp4(source, scale):
    tensor_scale = nvfp4_tensor_scale(np.abs(wide(source)).max())
    neighbours = NVFP4_NEIGHBOURS if scale == "mse" else (0,)
    native = KERNELS.nvfp4(source, tensor_scale, neighbours, fours=scale == "four-over-six")
    same(native, round_nvfp4(wide(source), tensor_scale, scale))


@given(sources(multiple=32), st.sampled_from(sorted(MX_WAYS)))
def test_mxfp4_and_mxfp8(source, scale):
    same(KERNELS.mxfp4(source, MX_WAYS[scale]), round_mxfp4(wide(source), scale))
    same(KERNELS.mxfp8(source), round_mxfp8(wide(source)))


@given(sources())
def test_magnitudes_and_norms(source):
    largest, norm = KERNELS.measure(source)
    assert largest == np.abs(wide(source)).max()
    assert norm == pytest.approx(np.square(source.astype(np.float64)).sum(), rel=1e-12)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_damaged_value_is_found_in_its_row(dtype, value):
    source = np.ones((20, 64), dtype)
    source[13, 40] = value
    calls = (
        KERNELS.measure,
        KERNELS.int8,
        KERNELS.mxfp8,
        KERNELS.fp8_band,
        lambda rows: KERNELS.fp8(rows, None),
        lambda rows: KERNELS.mxfp4(rows, (True,)),
        lambda rows: KERNELS.nvfp4(rows, np.float32(1), (0,), fours=False),
        lambda rows: KERNELS.int4(
            rows, 32, symmetric=True, factors=(1.0,), smallest=np.float32(1), scale_dtype=np.float16
        ),
    )
    for call in calls:
        with pytest.raises(DamagedRowError) as error:
            call(source)
        assert error.value.row == 13


def test_rows_need_not_be_aligned():
    data = np.random.default_rng(0).standard_normal(16 * 64).astype(ml_dtypes.bfloat16).tobytes()
    shifted = np.frombuffer(b"x" + data, np.uint8)[1:].view(ml_dtypes.bfloat16).reshape(16, 64)
    same(KERNELS.fp8(shifted, None), round_fp8(wide(shifted)))


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block", "fp8-tensor", "int4-rtn", "int8", "nvfp4", "mxfp4", "mxfp8"])
def test_a_checkpoint_is_the_same_with_and_without_them(tmp_path, recipe):
    """In a process of its own, since the switch is read once."""
    from tiny_checkpoints import tiny_weights, write_safetensors

    weights = {name: value.astype(np.float16) for name, value in tiny_weights().items()}
    source = write_safetensors(tmp_path / "model", weights)
    for switch in ("0", "1"):
        environment = os.environ | {library.SWITCH: switch}
        code = "from sys import argv; from pathlib import Path; from quantize import load_recipe, quantize_checkpoint\n"
        code += "quantize_checkpoint(Path(argv[1]), Path(argv[2]), load_recipe(argv[3]))"
        command = [sys.executable, "-c", code, str(source), str(tmp_path / switch), recipe]
        subprocess.run(command, env=environment, check=True)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes()


def test_an_installation_without_them_says_what_it_costs(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with caplog.at_level(logging.WARNING):
        assert library.native_library.__wrapped__() is None
    assert "several times as long" in caplog.text


def test_a_library_of_another_version_is_not_used(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(library.SWITCH, raising=False)
    (tmp_path / "rounding.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert library.native_library.__wrapped__() is None
    assert "cannot be used" in caplog.text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_processors_without_the_vector_instructions_keep_all_other_kernels(tmp_path, monkeypatch):
    """As on ARM, where products of bfloat16 and casts by F16C are not compiled at all."""
    sources = sorted(map(str, Path(library.__file__).parent.glob("*.c")))
    flags = ["-std=c11", "-O0", "-ffp-contract=off", "-DPLAIN_C", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, *sources, "-lm", "-o", str(tmp_path / "rounding.so")], check=True)
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    plain = library.native_library.__wrapped__()
    for module in (casts, products):
        monkeypatch.setattr(module, "native_library", lambda: plain)
    assert casts.native_casts.__wrapped__() is None and products.native_products.__wrapped__() is None
    rows = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    rounded, _ = Kernels(plain).int8(rows)
    assert rounded.values.tobytes() == round_int8(rows).values.tobytes()
