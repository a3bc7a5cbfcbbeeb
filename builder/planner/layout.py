"""One way to spread a decoder over GPUs: whether it fits, what it holds and what bounds its speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from builder.parallel import Parallelism
from builder.planner.decoder_shape import DecoderShape
from builder.planner.footprint import Footprint, StepLimits, footprint
from builder.planner.gpu import Gpu
from builder.planner.precision import Precision
from builder.planner.roofline import Roofline, StepTime
from builder.planner.stage import Stage, pipeline_stages

_LARGEST_BATCH = 4096  # that an engine can be built for


@dataclass(frozen=True)
class Workload:
    """Sequences of ``context`` tokens, prompt and continuation, ``batch_size`` of them at once."""

    context: int
    batch_size: int


@dataclass(frozen=True, eq=False)
class Layout:
    parallelism: Parallelism
    stages: Sequence[Stage]
    gpu: Gpu
    precision: Precision
    limits: StepLimits
    workload: Workload

    @cached_property
    def footprints(self) -> list[Footprint]:
        """Of a rank of each pipeline stage."""
        return self._footprints(self.limits)

    @cached_property
    def tightest(self) -> int:
        """The pipeline stage whose KV cache holds the fewest tokens."""
        return min(range(len(self.stages)), key=lambda stage: _room(self.footprints[stage]))

    @property
    def footprint(self) -> Footprint:
        """Of the tightest stage."""
        return self.footprints[self.tightest]

    @property
    def num_blocks(self) -> int:
        return self.footprint.num_blocks

    @property
    def most_tokens(self) -> int:
        """That the pools of an engine with these limits can be made for, however much memory there is."""
        return min(self.limits.most_blocks(stage) for stage in self.stages) * self.limits.tokens_per_block

    @property
    def num_tokens(self) -> int:
        """That the KV cache holds."""
        return self.num_blocks * self.limits.tokens_per_block

    @property
    def num_sequences(self) -> int:
        """Of the workload's context, that the KV cache holds whole; a step takes max_batch_size of them."""
        return self.num_blocks // self.limits.blocks_of(self.workload.context)

    @property
    def fits(self) -> bool:
        return self.num_sequences >= self.workload.batch_size

    @property
    def batch_size(self) -> int:
        """Sequences that run at once."""
        return min(self.num_sequences, self.limits.max_batch_size)

    @cached_property
    def largest_batch(self) -> int:
        """The largest max_batch_size whose sequences all find room for their whole context."""
        low, high = 0, _LARGEST_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._holds(middle) else (low, middle - 1)
        return low

    @cached_property
    def roofline(self) -> Roofline:
        return Roofline(self.stages, self.gpu, self.precision.kv_bytes, self.precision.float_math)

    def decode(self, batch_size: int) -> StepTime:
        return self.roofline.decode(batch_size, self.workload.context)

    @property
    def prefill(self) -> StepTime:
        return self.roofline.prefill(self.workload.context, self.limits)

    def _holds(self, batch_size: int) -> bool:
        needed = batch_size * self.limits.blocks_of(self.workload.context)
        limits = replace(self.limits, max_batch_size=batch_size)
        most = min(limits.most_blocks(stage) for stage in self.stages)
        return min(most, *(part.num_blocks for part in self._footprints(limits))) >= needed

    def _footprints(self, limits: StepLimits) -> list[Footprint]:
        memory = self.gpu.memory_bytes
        return [footprint(stage, memory, limits, self.precision.kv_bytes) for stage in self.stages]


def make_layout(
    shape: DecoderShape,
    precision: Precision,
    parallelism: Parallelism,
    gpu: Gpu,
    limits: StepLimits,
    workload: Workload,
) -> Layout:
    """Of a parallelism that is legal. Raises QuantizeError where the recipe does not fit the model."""
    stages = pipeline_stages(shape, precision, parallelism)
    return Layout(parallelism, stages, gpu, precision, limits, workload)


def _room(part: Footprint) -> float:
    """To compare stages that hold nothing, too: by how much they are too small."""
    return part.kv_cache / part.bytes_per_block
