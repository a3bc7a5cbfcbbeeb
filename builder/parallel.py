"""How a model is spread over GPUs: tensor, pipeline and expert parallelism, and one rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallelism:
    """World size is tp_size * pp_size. The names are trtllm-build's.

    Ranks of one tensor-parallel group are neighbours: rank = pp_rank * tp_size + tp_rank. ``ep_size`` divides tp_size:
    so many groups of ranks hold different experts, and each expert is split over the ranks of a group.
    """

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def moe_tp_size(self) -> int:
        """So many ranks share an expert."""
        return self.tp_size // self.ep_size

    def ranks(self) -> list[Rank]:
        return [Rank(self, rank) for rank in range(self.world_size)]


@dataclass(frozen=True)
class Rank:
    """One GPU's part of the model."""

    parallelism: Parallelism = Parallelism()
    rank: int = 0  # 0 .. world_size - 1

    @property
    def tp_rank(self) -> int:
        return self.rank % self.parallelism.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.parallelism.tp_size

    @property
    def tp_group(self) -> tuple[int, ...]:
        """World ranks that hold parts of the same layers, this one included."""
        first = self.pp_rank * self.parallelism.tp_size
        return tuple(range(first, first + self.parallelism.tp_size))

    @property
    def ep_rank(self) -> int:
        """Which share of the experts; neighbours hold different ones, as TensorRT-LLM's mapping has it."""
        return self.tp_rank % self.parallelism.ep_size

    @property
    def moe_tp_rank(self) -> int:
        """Which part of each of its experts."""
        return self.tp_rank // self.parallelism.ep_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.parallelism.pp_size - 1

    def layers(self, num_layers: int) -> range:
        """Decoder layers of this rank's stage: even shares, the first stages one more where they do not divide."""
        share, rest = divmod(num_layers, self.parallelism.pp_size)
        first = self.pp_rank * share + min(self.pp_rank, rest)
        return range(first, first + share + (self.pp_rank < rest))

    def experts(self, num_experts: int) -> range:
        """Experts of each sparse layer that this rank computes, wholly or a part of each."""
        share = num_experts // self.parallelism.ep_size
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)
