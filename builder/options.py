"""What a build is asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from builder.model_spec import ModelSpec
from plansmith_errors import BuildError

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
        longest = spec.rope.max_positions
        if self.max_seq_len is None:
            return min(spec.max_position_embeddings, _DEFAULT_MAX_SEQ_LEN)
        if self.max_seq_len > longest:
            raise BuildError(
                f"max_seq_len is {self.max_seq_len}, but the model has {longest} positions; lower max_seq_len"
            )
        return self.max_seq_len
