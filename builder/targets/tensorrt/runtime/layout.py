"""What loading needs to know of an engine directory."""

from __future__ import annotations

import msgspec

from builder.parallel import Parallelism, Rank
from builder.targets.tensorrt.runtime.gpu import Mode


class PlanFile(msgspec.Struct, frozen=True):
    """A plan, with one optimization profile for each of ``modes``, in their order."""

    name: str
    modes: tuple[Mode, ...]


class EngineLayout(msgspec.Struct, frozen=True):
    """One engine: plans for each rank. It goes to the ranks' processes as JSON."""

    target: str  # "tensorrt" or "tensorrt-rtx"
    directory: str
    plans: tuple[tuple[PlanFile, ...], ...]  # by rank
    weights: tuple[tuple[str, ...], ...]  # safetensors files of a rank's external weights, by rank
    devices: tuple[int, ...]  # the number of each rank's GPU in this machine
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
