"""The CPU target's StepEngine: one OpenVINO infer request over KV pools that this object owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.manifest import EngineManifest
from builder.model_spec import ModelSpec
from builder.targets.cpu.attention import TOKENS_PER_BLOCK
from builder.targets.cpu.compiled import KvPool, compile_engine, kv_pools
from builder.targets.cpu.input_buffer import InputBuffer
from builder.targets.cpu.settings import thread_properties
from plansmith_errors import BuildError, EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

_MAX_DEFAULT_KV_BYTES = 1 << 30
_STEP_INPUTS = (  # in the order in which step() sets them
    "input_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
    "logits_indices",
)


class OpenVinoEngine:
    """Implements StepEngine. ``infer`` releases the GIL."""

    def __init__(
        self, path: Path, manifest: EngineManifest, *, num_blocks: int | None = None, num_threads: int | None = None
    ) -> None:
        spec = _spec(path, manifest)
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
        _allocate(self._request, pools, count)
        names = [port.get_any_name() for port in compiled.inputs]
        self._buffers = [InputBuffer(self._request, names.index(name)) for name in _STEP_INPUTS]

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        request = self._request
        if request is None:
            raise EngineError("the engine is closed; load it again")
        self._check(inputs)
        longest = (inputs.past_lens + inputs.query_starts[1:] - inputs.query_starts[:-1]).max()
        arrays: tuple[npt.NDArray[Any], ...] = (
            inputs.input_ids,
            inputs.position_ids,
            inputs.past_lens,
            inputs.query_starts,
            inputs.block_indices,
            inputs.block_begins,
            np.array(longest, np.int32),
            inputs.logits_indices,
        )
        try:
            for buffer, array in zip(self._buffers, arrays, strict=True):
                buffer.put(array)
            request.infer(share_outputs=True)  # by default it copies the logits
        except RuntimeError as error:
            raise EngineError(f"OpenVINO failed in a step: {str(error).strip().splitlines()[-1]}") from error
        logits: npt.NDArray[np.float32] = request.get_output_tensor(0).data[:, 0]
        return logits

    def close(self) -> None:
        self._request = None
        self._buffers = []

    def _check(self, inputs: StepInputs) -> None:
        """Guard the kernel, which would read and write outside its pools."""
        num_tokens = len(inputs.input_ids)
        if not 0 < num_tokens <= self._limits.max_num_tokens:
            raise EngineError(f"a step has {num_tokens} tokens; this engine takes 1 to {self._limits.max_num_tokens}")
        highest = inputs.block_indices.view(np.uint32).max()  # a negative number reads as a huge one
        if highest >= self._limits.num_blocks:
            raise EngineError(f"a step names KV block {highest}; this engine has {self._limits.num_blocks}")


def _spec(path: Path, manifest: EngineManifest) -> ModelSpec:
    try:
        return ModelSpec.from_hf_config(manifest.model)
    except BuildError as error:
        raise EngineError(f"{path}: the manifest's model: {error}") from None


def _allocate(request: Any, pools: list[KvPool], num_blocks: int) -> None:
    from openvino import Shape, Tensor

    for pool in pools:
        request.set_tensor(pool.name, Tensor(pool.element_type, Shape([num_blocks, *pool.block_shape])))


def _default_num_blocks(manifest: EngineManifest, bytes_per_block: int) -> int:
    """Room for a full batch of full sequences, within 1 GiB, and for one full sequence whatever it takes."""
    per_sequence = -(-manifest.limits.max_seq_len // TOKENS_PER_BLOCK)
    wanted = manifest.limits.max_batch_size * per_sequence
    return max(min(wanted, _MAX_DEFAULT_KV_BYTES // bytes_per_block), per_sequence)
