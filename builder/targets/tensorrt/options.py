"""What a network is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NetworkDtype = Literal["float16", "bfloat16", "float32"]
StepMode = Literal["mixed", "decode"]
"""``mixed``: prefill chunks and decodes in one step. ``decode``: one new token of each sequence."""
MODES: tuple[StepMode, ...] = ("mixed", "decode")  # a plan's optimization profiles, in order


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Limits carry trtllm-build's names and are in sequences and tokens."""

    dtype: NetworkDtype = "float16"  # of activations; float32 is for exact comparison, not for plans
    max_batch_size: int = 8
    max_num_tokens: int = 512
    max_seq_len: int = 4096
    tokens_per_block: int = 64  # a power of two
    kv_dtype: Literal["auto", "int8"] = "auto"  # auto: as ``dtype``
    weights: Literal["embedded", "external"] = "embedded"  # external: weights are network inputs
    sms: tuple[int, ...] = ()  # for example 89; empty: what the library takes by itself
