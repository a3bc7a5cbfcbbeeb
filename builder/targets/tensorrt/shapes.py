"""How large the step's tensors can be. The network's profiles and the run-time's arrays agree through these."""

from __future__ import annotations

from typing import Protocol

_QUERY_TILE = 256  # tokens
_MOST_ELEMENTS = 2**31 - 1  # of one tensor
_SPARE_POOLS = 4  # times the blocks of a full batch: room for cached prefixes


class StepLimits(Protocol):
    """Of NetworkOptions and of EngineLimits alike."""

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_num_tokens(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def tokens_per_block(self) -> int: ...


def query_tile(limits: StepLimits) -> int:
    """Most new tokens of one row of a ``mixed`` step.

    A row is a sequence, or a part of one that has more new tokens. Were each sequence one row, a single long prompt
    would pad the queries and masks of all others to its length.
    """
    return min(limits.max_num_tokens, _QUERY_TILE)


def max_rows(limits: StepLimits) -> int:
    """Most rows of a ``mixed`` step."""
    sequences = min(limits.max_batch_size, limits.max_num_tokens)
    return sequences + (limits.max_num_tokens - sequences) // query_tile(limits)


def max_blocks_per_sequence(limits: StepLimits) -> int:
    return -(-limits.max_seq_len // limits.tokens_per_block)


def max_num_blocks(limits: StepLimits, elements_per_token: int) -> int:
    """Most blocks of a pool with ``elements_per_token`` = kv_heads * head_dim."""
    wanted = _SPARE_POOLS * limits.max_batch_size * max_blocks_per_sequence(limits)
    return min(wanted, _MOST_ELEMENTS // (elements_per_token * limits.tokens_per_block))
