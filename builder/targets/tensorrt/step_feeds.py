"""The arrays that a step's network inputs take, from the step contract. NumPy alone, and no loop over tokens.

All are int32. A row is a sequence; one with more new tokens than a tile has several, each with the sequence's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.options import StepMode
from builder.targets.tensorrt.shapes import query_tile
from plugins.inflight_batching.step import EngineLimits, StepInputs

Array = npt.NDArray[np.int32]


def choose_mode(inputs: StepInputs) -> StepMode:
    """``decode`` where each sequence has one new token."""
    return "decode" if len(inputs.input_ids) == len(inputs.past_lens) else "mixed"


def step_feeds(inputs: StepInputs, limits: EngineLimits, mode: StepMode) -> dict[str, Array]:
    """By the name of the network input, without KV pools and weights; a network takes those that it has.

    input_ids, position_ids [num_tokens]; logits_indices [num_logits];
    block_tables [num_rows, blocks of the longest row], padded with block 0;
    update_order [num_tokens]: new tokens sorted by page; page_update_starts [num_blocks + 1]: where those of a page
    begin in it; page_write_offsets [num_blocks]: place of the first of them within the page;
    token_slots [num_tokens]: page * tokens_per_block + place within the page, of each new token (int8 pools);
    query_gather [num_rows, most tokens of a row], padded with the row's last token; query_scatter [num_tokens]: each
    token's place in query_gather.
    """
    slots = _token_slots(inputs, limits.tokens_per_block)
    feeds = {
        "input_ids": inputs.input_ids.astype(np.int32),
        "position_ids": inputs.position_ids.astype(np.int32),
        "logits_indices": inputs.logits_indices.astype(np.int32),
        "token_slots": slots,
        **_page_updates(slots, limits),
    }
    tiles = _tiles(inputs.query_starts, 1 if mode == "decode" else query_tile(limits))
    return feeds | _queries(tiles) | {"block_tables": _block_tables(inputs, tiles.sequence)}


@dataclass(frozen=True)
class _Tiles:
    """Rows of a ``mixed`` step: [num_rows] each."""

    sequence: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]  # token of the step
    length: npt.NDArray[np.int64]  # tokens


def _tiles(query_starts: Array, tile: int) -> _Tiles:
    starts = query_starts.astype(np.int64)
    lengths = np.diff(starts)
    per_sequence = -(-lengths // tile)
    sequence = np.repeat(np.arange(len(lengths)), per_sequence)
    within = _counters(per_sequence) * tile
    return _Tiles(sequence, starts[sequence] + within, np.minimum(lengths[sequence] - within, tile))


def _queries(tiles: _Tiles) -> dict[str, Array]:
    longest = int(tiles.length.max())
    places = np.minimum(np.arange(longest), tiles.length[:, None] - 1)
    row_of_token = np.repeat(np.arange(len(tiles.length)), tiles.length)
    return {
        "query_gather": (tiles.begin[:, None] + places).astype(np.int32),
        "query_scatter": (row_of_token * longest + _counters(tiles.length)).astype(np.int32),
    }


def _block_tables(inputs: StepInputs, sequences: npt.NDArray[np.int64]) -> Array:
    """[len(sequences), longest], each the blocks of one of the step's sequences."""
    counts: npt.NDArray[np.int32] = np.diff(inputs.block_begins)[sequences]
    places = np.arange(int(counts.max()))
    is_block = places < counts[:, None]
    indices = np.where(is_block, inputs.block_begins[sequences, None] + places, 0)
    tables: Array = np.where(is_block, inputs.block_indices[indices], np.int32(0))
    return tables


def _token_slots(inputs: StepInputs, tokens_per_block: int) -> Array:
    new = np.diff(inputs.query_starts)
    cached = np.repeat(inputs.past_lens, new) + _counters(new)  # each token's place in its sequence
    blocks = inputs.block_indices[np.repeat(inputs.block_begins[:-1], new) + cached // tokens_per_block]
    slots: Array = (blocks * tokens_per_block + cached % tokens_per_block).astype(np.int32)
    return slots


def _page_updates(slots: Array, limits: EngineLimits) -> dict[str, Array]:
    pages, places = np.divmod(slots, limits.tokens_per_block)
    order = np.argsort(slots, kind="stable")
    counts = np.bincount(pages, minlength=limits.num_blocks)
    starts = np.zeros(limits.num_blocks + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    offsets = np.zeros(limits.num_blocks, np.int32)
    written = counts > 0
    offsets[written] = places[order][starts[:-1][written]]
    return {"update_order": order.astype(np.int32), "page_update_starts": starts, "page_write_offsets": offsets}


def _counters(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """0, 1, .. length - 1 of each, one after the other."""
    ends = np.cumsum(lengths, dtype=np.int64)
    counters: npt.NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return counters
