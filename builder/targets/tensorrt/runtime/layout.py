"""What loading needs to know of an engine directory."""

from __future__ import annotations

import msgspec

from builder.parallel import Parallelism, Rank
from builder.targets.tensorrt.runtime.gpu import Mode


class EngineLayout(msgspec.Struct, frozen=True):
    """One engine: plans for each rank. It goes to the ranks' processes as JSON."""

    target: str  # "tensorrt" or "tensorrt-rtx"
    directory: str
    plans: tuple[dict[Mode, str], ...]  # file names, by rank
    weights: tuple[str | None, ...]  # safetensors file of a rank's external weights, by rank
    parallelism: Parallelism
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int
    vocab_size: int
    hidden_size: int

    @property
    def leader(self) -> Rank:
        """The rank that runs in the process of the engine: the first that has logits, so that these need no journey."""
        return Rank(self.parallelism, self.parallelism.world_size - self.parallelism.tp_size)


def encode_layout(layout: EngineLayout) -> str:
    return msgspec.json.encode(layout).decode()


def decode_layout(text: str) -> EngineLayout:
    return msgspec.json.decode(text, type=EngineLayout)
