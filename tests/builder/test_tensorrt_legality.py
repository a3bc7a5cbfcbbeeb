"""What is refused before TensorRT is asked, and what its log says."""

import mmap
import sys

import numpy as np
import pytest

from builder.targets.tensorrt.build_log import LogLine, parse_footprint, reason_of
from builder.targets.tensorrt.legality import check_types
from builder.targets.tensorrt.memory import UnusedPages
from builder.targets.tensorrt.module import load_module
from builder.targets.tensorrt.payload import float_payload
from plansmith_errors import BuildError

LEGAL = {
    "float16": {75, 80, 86, 89, 120, 121},
    "int8": {75, 80, 86, 89, 120, 121},
    "bfloat16": {80, 86, 89, 120, 121},
    "int4": {80, 86, 89, 120, 121},
    "fp8": {89, 120, 121},
    "mxfp8": {89, 120, 121},
    "nvfp4": {120, 121},
    "mxfp4": {120, 121},
}


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 120, 121])
def test_types_are_refused_where_the_architecture_lacks_them(name, sm):
    if sm in LEGAL[name]:
        check_types([name, "none"], [sm])
        return
    with pytest.raises(BuildError) as refused:
        check_types([name], [89 if name in ("float16", "int8") else 120, sm])
    assert str(refused.value).startswith(f"sm{sm} does not compute {name}; sm75: float16, int8; sm80, sm86: float16, ")


def test_an_architecture_that_is_not_compiled_for_names_those_that_are():
    with pytest.raises(BuildError, match=r"sm90 is none of those that tensorrt-rtx compiles for \(sm75, sm80, .*sm121"):
        check_types(["float16"], [90])


def test_the_standard_library_serves_data_centers_too():
    check_types(["float16", "bfloat16", "int4", "fp8"], [90], "tensorrt")
    check_types(["nvfp4", "mxfp4"], [100, 120], "tensorrt")
    with pytest.raises(BuildError, match=r"sm90 does not compute nvfp4; sm75: .*; sm90: float16, bfloat16, int8, int4"):
        check_types(["nvfp4"], [90], "tensorrt")


def test_a_missing_library_is_named_with_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BuildError, match=r"target tensorrt needs the Python module tensorrt.*pip install"):
        load_module("tensorrt")


def test_memory_is_read_from_the_builders_log():
    texts = [
        "Total Weights Memory: 2208850176 bytes",
        "Total Activation Memory: 298587648 bytes",
        "Total Activation Memory: 134977024 bytes",
        "Max Scratch Memory: 4096 bytes",
    ]
    found = parse_footprint(LogLine("info", text) for text in texts)
    assert (found.weights_bytes, found.activation_bytes, found.scratch_bytes) == (2208850176, 298587648, 4096)
    assert parse_footprint([]).weights_bytes is None


def test_a_reason_is_one_line_without_places_in_the_librarys_source():
    text = (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:1500: run_passes] Cannot compile for "
        "target(s) sm89,\nbecause the model contains HW-specific datatypes In compileGraph at /_src/optimizer/a.cpp:12)"
    )
    assert reason_of(text) == ("Cannot compile for target(s) sm89, because the model contains HW-specific datatypes")
    assert reason_of("something else") == "something else"


def test_pages_of_mapped_weights_are_given_back_and_read_again(tmp_path):
    values = np.arange(1 << 20, dtype=np.float32)
    (tmp_path / "weights").write_bytes(values.tobytes())
    own = values.copy()
    with (tmp_path / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.float32)[1:].reshape(-1, 15)
    with UnusedPages([view, own]):
        pass
    assert np.array_equal(view.reshape(-1), values[1:])
    assert np.array_equal(own, values)


def test_floats_of_the_right_type_are_not_copied():
    values = np.ones((4, 8), np.float16)
    assert np.shares_memory(float_payload(values, "float16", "x").array, values)
    assert float_payload(values, "bfloat16", "x").array.dtype == np.uint16
