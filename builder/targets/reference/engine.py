"""The reference StepEngine, straight from a checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from builder.model_spec import ModelSpec
from builder.network import decoder
from builder.network.weights import WeightSource
from builder.options import BuildOptions
from builder.targets.reference.batch import make_batch
from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

TOKENS_PER_BLOCK = 32


class ReferenceEngine:
    """Implements StepEngine in eager float32. Made for comparison, not for speed."""

    def __init__(self, checkpoint_dir: Path, options: BuildOptions, num_blocks: int | None = None) -> None:
        from builder.targets.reference.ops import TorchOps
        from quantize import open_checkpoint

        _require_torch()
        checkpoint = open_checkpoint(checkpoint_dir)
        self._spec = ModelSpec.from_hf_config(checkpoint.config)
        max_seq_len = options.resolved_max_seq_len(self._spec)
        blocks = num_blocks or -(-max_seq_len // TOKENS_PER_BLOCK) * 4
        self._limits = EngineLimits(
            max_batch_size=options.max_batch_size,
            max_num_tokens=options.max_num_tokens,
            max_seq_len=max_seq_len,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=blocks,
            vocab_size=self._spec.vocab_size,
        )
        weights = WeightSource(checkpoint, self._spec)
        num_slots = blocks * TOKENS_PER_BLOCK
        self._ops: TorchOps | None = TorchOps(self._spec, weights, num_slots=num_slots, max_seq_len=max_seq_len)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        import torch

        if self._ops is None:
            raise EngineError("the engine is closed; load it again")
        with torch.inference_mode():
            self._ops.batch = make_batch(inputs, TOKENS_PER_BLOCK)
            logits: npt.NDArray[np.float32] = decoder(self._ops, self._spec).numpy()
        return logits

    def close(self) -> None:
        self._ops = None


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise EngineError(
            "the reference needs torch, which is not installed; run: pip install 'plansmith[quantize]'"
        ) from None
