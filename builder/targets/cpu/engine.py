"""The CPU target's StepEngine: one OpenVINO infer request over KV pools that this object owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.manifest import EngineManifest
from builder.model_spec import ModelSpec
from builder.targets.cpu.attention import TOKENS_PER_BLOCK
from builder.targets.cpu.compiled import compile_engine, kv_pools
from builder.targets.cpu.settings import thread_properties
from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

_MAX_DEFAULT_KV_BYTES = 1 << 30


class OpenVinoEngine:
    """Implements StepEngine. ``infer`` releases the GIL."""

    def __init__(
        self, path: Path, manifest: EngineManifest, *, num_blocks: int | None = None, num_threads: int | None = None
    ) -> None:
        spec = ModelSpec.from_hf_config(manifest.model)
        properties = manifest.compile_properties | thread_properties(num_threads)
        compiled = compile_engine(path, spec, properties)
        pools = kv_pools(compiled)
        limits = manifest.limits
        count = num_blocks or _default_num_blocks(manifest, sum(pool.bytes_per_block for pool in pools))
        self._limits = EngineLimits(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=count,
            vocab_size=limits.vocab_size,
        )
        self._request: Any = compiled.create_infer_request()
        self._allocate(pools, count)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine. The arrays of ``inputs`` are read in place."""
        request, tensor = self._request, self._tensor
        if request is None:
            raise EngineError("the engine is closed; load it again")
        self._check(inputs)
        longest = (inputs.past_lens + np.diff(inputs.query_starts)).max()
        arrays = {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids,
            "past_lens": inputs.past_lens,
            "subsequence_begins": inputs.query_starts,
            "block_indices": inputs.block_indices,
            "block_indices_begins": inputs.block_begins,
            "max_context_len": np.array(longest, np.int32),
            "logits_indices": inputs.logits_indices,
        }
        try:
            for name, array in arrays.items():
                request.set_tensor(name, tensor(array, shared_memory=True))
            request.infer()
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed in a step: {str(error).strip().splitlines()[-1]}") from error
        logits: npt.NDArray[np.float32] = request.get_output_tensor(0).data[:, 0]
        return logits

    def close(self) -> None:
        self._request = None

    def _check(self, inputs: StepInputs) -> None:
        """Guard the kernel, which would read and write outside its pools."""
        num_tokens, blocks = len(inputs.input_ids), inputs.block_indices
        if not 0 < num_tokens <= self._limits.max_num_tokens:
            raise EngineError(f"a step has {num_tokens} tokens; this engine takes 1 to {self._limits.max_num_tokens}")
        if blocks.min() < 0 or blocks.max() >= self._limits.num_blocks:
            raise EngineError(f"a step names KV block {blocks.max()}; this engine has {self._limits.num_blocks}")

    def _allocate(self, pools: list[Any], num_blocks: int) -> None:
        from openvino import Shape, Tensor

        self._tensor = Tensor
        for pool in pools:
            self._request.set_tensor(pool.name, Tensor(pool.element_type, Shape([num_blocks, *pool.block_shape])))


def _default_num_blocks(manifest: EngineManifest, bytes_per_block: int) -> int:
    """Room for a full batch of full sequences, within 1 GiB, and for one full sequence whatever it takes."""
    per_sequence = -(-manifest.limits.max_seq_len // TOKENS_PER_BLOCK)
    wanted = manifest.limits.max_batch_size * per_sequence
    return max(min(wanted, _MAX_DEFAULT_KV_BYTES // bytes_per_block), per_sequence)
