"""Compile properties of the CPU plugin for each precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

_WIDEST_DYNAMIC_GROUP = 128


def compile_properties(precision: Literal["fast", "exact"], int4_group_sizes: Iterable[int]) -> dict[str, str]:
    """Properties that change what is computed; they are stored with the engine.

    "fast" quantizes activations to int8 in groups. A group must lie within the weights' int4 groups: one twice as wide
    made prefill three times slower, one half as wide 15%.
    """
    from quantize.weight_rule import GROUP_SIZES

    if precision == "exact":
        return {
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "KV_CACHE_PRECISION": "f32",
        }
    group = math.gcd(*int4_group_sizes) or _WIDEST_DYNAMIC_GROUP
    if group not in GROUP_SIZES:  # rows that are one group each: a part of them that kernels have
        group = math.gcd(group, _WIDEST_DYNAMIC_GROUP)
    if group < min(GROUP_SIZES):
        group = 0  # activations stay floats
    return {"KV_CACHE_PRECISION": "u8", "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group)}


def thread_properties(num_threads: int | None) -> dict[str, str]:
    """Without pinning: a server, its tokenizers and other engines share the machine."""
    properties = {"ENABLE_CPU_PINNING": "NO"}
    if num_threads is not None:
        properties["INFERENCE_NUM_THREADS"] = str(num_threads)
    return properties
