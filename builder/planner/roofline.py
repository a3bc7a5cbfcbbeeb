"""The roofline (Williams, Waterman, Patterson 2009): the least time of a step, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from builder.planner.footprint import StepLimits
from builder.planner.gpu import Gpu, MathFormat
from builder.planner.local import LayerCost, LinearCost
from builder.planner.stage import Stage

Bound = Literal["memory", "compute", "communication"]
_HIDDEN_BYTES, _LOGIT_BYTES = 2, 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step through all pipeline stages, by what takes them; ``num_tokens`` new tokens come of it."""

    num_tokens: int
    memory: float
    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        return self.memory + self.compute + self.communication

    @property
    def bound(self) -> Bound:
        parts: dict[Bound, float] = {
            "memory": self.memory,
            "compute": self.compute,
            "communication": self.communication,
        }
        return max(parts, key=lambda name: parts[name])

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Roofline:
    """Of one layout on one kind of GPU. ``kv_bytes``: of one element of the cache; attention computes in 16 bits."""

    stages: Sequence[Stage]
    gpu: Gpu
    kv_bytes: int
    math: MathFormat

    def decode(self, batch_size: int, context: int) -> StepTime:
        """One new token for each of ``batch_size`` sequences that have ``context`` tokens."""
        work = _Work(self.gpu)
        for stage in self.stages:
            for layer, count in stage.layers:
                self._linears(work, layer.linears, count, batch_size, 1)
                seen = _seen(layer, context)
                pairs = batch_size * seen
                self._attention(work, layer, stage, count, pairs, pairs, decode=True)
            if stage.head is not None:
                self._linears(work, [stage.head], 1, batch_size, 1)
        communication = sum(self._communication(stage, batch_size, batch_size) for stage in self.stages)
        return StepTime(batch_size, work.memory, work.compute, communication)

    def prefill(self, num_tokens: int, limits: StepLimits) -> StepTime:
        """A prompt of ``num_tokens`` alone, in as many steps as chunks of max_num_tokens take."""
        work, chunk = _Work(self.gpu), min(limits.longest_chunk, num_tokens)
        num_steps = -(-num_tokens // chunk)
        for stage in self.stages:
            for layer, count in stage.layers:
                self._linears(work, layer.linears, count, num_tokens / num_steps, num_steps)
                pairs = _causal_pairs(num_tokens, layer.attention.window)
                read = sum(_seen(layer, min(step * chunk, num_tokens)) for step in range(1, num_steps + 1))
                self._attention(work, layer, stage, count, pairs, read, decode=False)
            if stage.head is not None:
                self._linears(work, [stage.head], 1, 1, 1)
        communication = sum(self._communication(stage, num_tokens, 1) for stage in self.stages)
        return StepTime(num_tokens, work.memory, work.compute, communication)

    def _linears(
        self, work: _Work, linears: Iterable[LinearCost], count: int, num_tokens: float, num_steps: int
    ) -> None:
        for linear in linears:
            nbytes = linear.bytes_read(num_tokens) * count * num_steps
            work.add(nbytes, linear.flops * num_tokens * count * num_steps, linear.math)

    def _attention(
        self, work: _Work, layer: LayerCost, stage: Stage, count: int, pairs: float, tokens_read: float, *, decode: bool
    ) -> None:
        flops = layer.attention.pair_flops(stage.parallelism.tp_size, decode=decode) * pairs * count
        work.add(layer.kv_elements * self.kv_bytes * tokens_read * count, flops, self.math)

    def _communication(self, stage: Stage, num_tokens: int, num_logits: int) -> float:
        """Ring collectives: each rank sends 2 (n - 1) / n of the bytes of a sum, (n - 1) / n of those of a gather."""
        parallelism = stage.parallelism
        hidden = _HIDDEN_BYTES * num_tokens * stage.hidden_size
        sent = 0.0
        if parallelism.tp_size > 1:
            ring = (parallelism.tp_size - 1) / parallelism.tp_size
            sent += 2 * ring * hidden * (2 * stage.num_layers + stage.is_first)
            sent += ring * _LOGIT_BYTES * num_logits * stage.vocab_size if stage.is_last else 0.0
        seconds = sent / self.gpu.link_bytes_per_second(parallelism.tp_size)
        if stage.is_last:
            return seconds
        return seconds + hidden / self.gpu.link_bytes_per_second(parallelism.world_size)


class _Work:
    """Sums up the times of operations, each bound by memory or by arithmetic."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.memory = self.compute = 0.0

    def add(self, nbytes: float, flops: float, math: MathFormat) -> None:
        memory, compute = nbytes / self._gpu.bytes_per_second, flops / self._gpu.flops(math)
        if memory >= compute:
            self.memory += memory
        else:
            self.compute += compute


def _seen(layer: LayerCost, context: int) -> int:
    window = layer.attention.window
    return context if window is None else min(context, window)


def _causal_pairs(num_tokens: int, window: int | None) -> float:
    """Query and key tokens that meet: the i-th query sees i keys, or those in its window."""
    seen = num_tokens if window is None else min(window, num_tokens)
    return seen * (seen + 1) / 2 + (num_tokens - seen) * seen
