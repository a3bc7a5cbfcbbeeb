"""What a build is asked for."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from builder.model_spec import ModelSpec
from plansmith_errors import BuildError

log = logging.getLogger(__name__)

_DEFAULT_MAX_SEQ_LEN = 4096


class BuildOptions(BaseModel):
    """Limits carry trtllm-build's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: Literal["cpu"] = "cpu"
    precision: Literal["fast", "exact"] = "fast"
    """"fast": the CPU's best types, 8-bit KV cache. "exact": float32 throughout, the same result in every batch."""
    max_batch_size: int = Field(default=32, ge=1, le=4096)
    max_num_tokens: int = Field(default=512, ge=1, le=1 << 20)
    max_seq_len: int | None = Field(default=None, ge=2)
    """None: the model's own limit, at most 4096."""

    def resolved_max_seq_len(self, spec: ModelSpec) -> int:
        """The sequence limit of a build of ``spec``. Raises BuildError where the model has no such positions."""
        longest = spec.max_positions
        limit = self.max_seq_len or min(spec.max_position_embeddings, _DEFAULT_MAX_SEQ_LEN)
        if limit > longest:
            raise BuildError(f"max_seq_len is {limit}, but the model has {longest} positions; lower max_seq_len")
        if spec.rope.takes_long_factors(limit):
            log.warning(
                "longrope's long factors are compiled in for max_seq_len %d; sequences of up to %d tokens come out "
                "other than with the short ones, which transformers takes for them",
                limit,
                spec.rope.original_max_position_embeddings,
            )
        return limit
