"""Where the memory of one GPU goes: docs/capacity-planner.md derives every term."""

from __future__ import annotations

from dataclasses import dataclass

from builder.planner.stage import Stage
from builder.targets.tensorrt.shapes import max_num_blocks, max_rows, query_tile

_CONTEXT_BYTES = 512 << 20  # a CUDA context with the kernels of an engine loaded; an assumption
_COMMUNICATOR_BYTES = 512 << 20  # NCCL's channels and buffers where ranks talk; an assumption
_ACTIVATION_BYTES, _LOGIT_BYTES, _MASK_BYTES = 2, 4, 1
_SCORE_BYTES = 6  # in float32 before the softmax, in 16 bits after


@dataclass(frozen=True)
class StepLimits:
    """What an engine is built for. Names are trtllm-build's."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int = 64
    free_fraction: float = 0.9  # of what is left over, for the KV cache; the rest is a margin for fragmentation

    @property
    def longest_chunk(self) -> int:
        """New tokens of one sequence in one step."""
        return min(self.max_num_tokens, self.max_seq_len)

    def most_blocks(self, stage: Stage) -> int:
        """That the pools of an engine with these limits can have, however much memory there is."""
        return max_num_blocks(self, stage.most_kv_elements // 2)

    def blocks_of(self, num_tokens: int) -> int:
        """A sequence's last block counts whole."""
        return -(-num_tokens // self.tokens_per_block)


@dataclass(frozen=True)
class Footprint:
    """Bytes on one GPU. They sum up to its memory; ``kv_cache`` is negative where the rest does not fit."""

    memory: int
    reserved: int
    weights: int
    activations: int
    logits: int
    margin: int
    kv_cache: int
    bytes_per_block: int

    @property
    def num_blocks(self) -> int:
        return max(self.kv_cache, 0) // self.bytes_per_block


def footprint(stage: Stage, memory: int, limits: StepLimits, kv_bytes: int) -> Footprint:
    reserved = _CONTEXT_BYTES + (_COMMUNICATOR_BYTES if stage.parallelism.world_size > 1 else 0)
    activations = activation_bytes(stage, limits)
    logits = _LOGIT_BYTES * limits.max_batch_size * stage.vocab_size if stage.is_last else 0
    free = memory - reserved - stage.weight_bytes - activations - logits
    margin = round(free * (1 - limits.free_fraction)) if free > 0 else 0
    return Footprint(
        memory=memory,
        reserved=reserved,
        weights=stage.weight_bytes,
        activations=activations,
        logits=logits,
        margin=margin,
        kv_cache=free - margin,
        bytes_per_block=stage.kv_elements * kv_bytes * limits.tokens_per_block,
    )


def activation_bytes(stage: Stage, limits: StepLimits) -> int:
    """The most that is alive at once, weights aside: around attention, around the MLP, or around the head."""
    return max(_attention_bytes(stage, limits), _mlp_bytes(stage, limits), _head_bytes(stage, limits))


def _attention_bytes(stage: Stage, limits: StepLimits) -> int:
    """Block tables gather all keys and values of a layer's rows; queries are padded to rows of one length."""
    context = limits.blocks_of(limits.max_seq_len) * limits.tokens_per_block
    rows, tile = max_rows(limits), query_tile(limits)
    gathered = max(rows, limits.max_batch_size) * context * stage.most_kv_elements
    padded = 2 * rows * tile * stage.query_width  # queries, and the output in their place
    mask = 2 * rows * tile * context * _MASK_BYTES  # made, and laid out for the kernel
    scores = rows * tile * context * stage.num_kept_scores * _SCORE_BYTES
    residual = limits.max_num_tokens * stage.hidden_size
    return _ACTIVATION_BYTES * (gathered + padded + residual) + mask + scores


def _mlp_bytes(stage: Stage, limits: StepLimits) -> int:
    elements = 3 * stage.hidden_size + stage.mlp_elements  # residual, its norm and the output
    return _ACTIVATION_BYTES * limits.max_num_tokens * elements


def _head_bytes(stage: Stage, limits: StepLimits) -> int:
    if not stage.is_last:
        return 0
    residual = limits.max_num_tokens * stage.hidden_size
    logits = limits.max_batch_size * (2 * stage.hidden_size + stage.local_vocab_size)
    return _ACTIVATION_BYTES * (residual + logits)
