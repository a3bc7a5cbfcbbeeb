"""The part of ``engine.json`` that engines of GPU targets have: plans of each rank, and what they need.

Plans cannot be opened without a GPU, so all that a reader may want to know of them is written down by the build.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from builder.manifest_part import ManifestPart
from builder.parallel import Parallelism

Mode = Literal["mixed", "decode"]


class ShapeRange(ManifestPart):
    """Of one input in an optimization profile."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class Footprint(ManifestPart):
    """GPU memory of one plan in bytes, as the builder's log states it; null where it does not."""

    weights_bytes: int | None = Field(ge=0)
    activation_bytes: int | None = Field(ge=0)
    scratch_bytes: int | None = Field(ge=0)


class PlanRecord(ManifestPart):
    file: str
    modes: tuple[Mode, ...]  # one optimization profile each, in this order
    footprint: Footprint
    profiles: dict[Mode, dict[str, ShapeRange]]  # by input; KV pools excepted
    layers: dict[str, int]  # layers of the network by type
    build_seconds: float = Field(ge=0)  # inside the vendor's builder


class RankRecord(ManifestPart):
    """What one GPU holds."""

    rank: int = Field(ge=0)
    first_layer: int = Field(ge=0)  # decoder layers of this rank's pipeline stage
    num_layers: int = Field(ge=1)
    plans: tuple[PlanRecord, ...] = Field(min_length=1)
    weight_files: tuple[str, ...]  # weights that are inputs of the plans; empty where they are embedded
    constants: dict[str, int]  # bytes of the network's constants or external weights, by dtype
    kv_bytes_per_block: int = Field(ge=1)
    other_seconds: float = Field(ge=0)  # reading weights, making networks, writing files
    peak_rss_bytes: int | None  # of the process that built it

    @property
    def file_names(self) -> list[str]:
        return [*(plan.file for plan in self.plans), *self.weight_files]

    @property
    def gpu_bytes(self) -> int:
        """Before any KV cache: the weights of every plan and beside them, and the activations of each mode, which has
        an execution context of its own.

        Scratch is a part of what the builder's log counts as activations.
        """
        total = sum(self.constants.values()) if self.weight_files else 0
        for plan in self.plans:
            needs = plan.footprint
            total += needs.weights_bytes or 0
            total += max(needs.activation_bytes or 0, needs.scratch_bytes or 0) * len(plan.modes)
        return total


class GpuEngine(ManifestPart):
    sms: tuple[int, ...] = Field(min_length=1)
    dtype: Literal["float16", "bfloat16"]
    tp_size: int = Field(ge=1)
    pp_size: int = Field(ge=1)
    ep_size: int = Field(ge=1)
    weights: Literal["embedded", "external"]
    ranks: tuple[RankRecord, ...]

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp_size, self.pp_size, self.ep_size)
