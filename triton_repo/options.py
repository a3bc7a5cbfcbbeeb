"""What a user can choose about a packaged model."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class PackageOptions(BaseModel):
    """Settings of a model repository; they end up in ``config.pbtxt``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    model_name: str = Field("llm", description="Name of the model in Triton; also its directory.")
    max_queue_size: int = Field(
        128, ge=1, le=1 << 20, description="Requests that may wait beside those in the batch; more are refused."
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens the KV cache holds, rounded up to blocks; the engine's own choice when left out.",
    )
    num_threads: int | None = Field(
        None, ge=1, le=4096, description="Threads of a CPU engine; the engine's own choice when left out."
    )

    @field_validator("model_name")
    @classmethod
    def _is_safe_name(cls, value: str) -> str:
        if not MODEL_NAME.fullmatch(value):
            raise ValueError("expected 1 to 128 letters, digits, '.', '_' or '-', the first a letter or digit")
        return value
