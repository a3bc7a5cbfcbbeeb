"""Compile properties of the CPU plugin for each precision."""

from __future__ import annotations

import re
from typing import Literal

LIBRARY = "openvino"

_PROPERTIES = {
    # Activations are quantized to int8 per group of 64: as wide as the narrowest weight groups in use and no wider
    # than a row of any model; without it prefill is four times slower.
    "fast": {"KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"},
    "exact": {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "KV_CACHE_PRECISION": "f32",
    },
}


def compile_properties(precision: Literal["fast", "exact"]) -> dict[str, str]:
    return dict(_PROPERTIES[precision])


def thread_properties(num_threads: int | None) -> dict[str, str]:
    """Without pinning: a server, its tokenizers and other engines share the machine."""
    properties = {"ENABLE_CPU_PINNING": "NO"}
    if num_threads is not None:
        properties["INFERENCE_NUM_THREADS"] = str(num_threads)
    return properties


def library_version() -> str:
    """Release of the installed OpenVINO, as "2026.4.1". Raises ImportError where there is none."""
    import openvino

    return re.split(r"[-+]", openvino.__version__)[0]
