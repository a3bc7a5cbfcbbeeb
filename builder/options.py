"""What a build is asked for."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from builder.model_spec import ModelSpec
from builder.parallel import Parallelism
from builder.targets.facts import TARGETS, TargetName
from plansmith_errors import BuildError

log = logging.getLogger(__name__)

_DEFAULT_MAX_SEQ_LEN = 4096
_DEFAULT_TOKENS_PER_BLOCK = 64
_GPU_ONLY = (
    "dtype",
    "sms",
    "tp_size",
    "pp_size",
    "ep_size",
    "weights",
    "kv_cache_dtype",
    "tokens_per_block",
    "executor",
    "max_build_workers",
)
_HOW_NOT_WHAT = frozenset({"executor", "max_build_workers"})  # the engine is the same whatever they are

_Size = Annotated[int, Field(ge=1, le=1024)]


class BuildOptions(BaseModel):
    """Limits carry trtllm-build's names. A setting that the target would not honour is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: TargetName = "cpu"
    precision: Literal["fast", "exact"] = "fast"
    """"fast": the CPU's best types, 8-bit KV cache. "exact": float32 throughout, the same result in every batch."""
    max_batch_size: int = Field(default=32, ge=1, le=4096)
    max_num_tokens: int = Field(default=512, ge=1, le=1 << 20)
    max_seq_len: int | None = Field(default=None, ge=2)
    """None: the model's own limit, at most 4096."""

    dtype: Literal["float16", "bfloat16"] | None = Field(
        default=None, description="GPU targets: type of activations and of weights that are not quantized; float16."
    )
    sms: Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        default=None,
        description="GPU targets: compute capabilities to compile for, such as [89, 120]; those of this machine's GPUs "
        "when left out.",
    )
    tp_size: _Size = Field(default=1, description="GPU targets: ranks that share each layer.")
    pp_size: _Size = Field(default=1, description="GPU targets: pipeline stages, each of some layers.")
    ep_size: _Size = Field(default=1, description="GPU targets: groups of ranks with different experts; in tp_size.")
    weights: Literal["embedded", "external"] | None = Field(
        default=None,
        description="GPU targets: weights in the plan (embedded), or in files beside it that plans of one shape share.",
    )
    kv_cache_dtype: Literal["auto", "int8"] | None = Field(
        default=None, description="GPU targets: auto is the type of the activations."
    )
    tokens_per_block: int | None = Field(
        default=None, ge=8, le=1024, description="GPU targets: tokens in a KV block, a power of two; 64."
    )
    executor: Literal["local", "ray"] | None = Field(
        default=None, description="GPU targets: where ranks are built: processes of this machine, or a Ray cluster."
    )
    max_build_workers: int | None = Field(
        default=None, ge=1, description="GPU targets: ranks built at a time; what fits in memory when left out."
    )

    @field_validator("precision", *_GPU_ONLY)
    @classmethod
    def _is_honoured(cls, value: Any, info: ValidationInfo) -> Any:
        facts = TARGETS.get(info.data.get("target", ""))
        if facts is None or value == cls.model_fields[str(info.field_name)].default:
            return value
        if info.field_name == "precision" and facts.is_gpu:
            raise ValueError(f"target {facts.name} computes in build.dtype, float16 or bfloat16; remove it")
        if info.field_name != "precision" and not facts.is_gpu:
            raise ValueError(
                f"target {facts.name} has no such choice; remove it, or set build.target to tensorrt-rtx or tensorrt"
            )
        return value

    @field_validator("sms")
    @classmethod
    def _compiles_for(cls, value: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        facts = TARGETS.get(info.data.get("target", ""))
        if value is None or facts is None:
            return value
        if not value:
            raise ValueError("names no GPU; give compute capabilities, such as [89], or leave it out")
        for sm in value:
            if sm not in facts.sms:
                raise ValueError(_no_such_sm(sm, facts.name))
        if not facts.is_ahead_of_time and len(set(value)) > 1:
            raise ValueError(f"target {facts.name} compiles for the one GPU model of its machine; name one or none")
        return tuple(sorted(set(value)))

    @field_validator("tokens_per_block")
    @classmethod
    def _is_power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("expected a power of two, such as 32 or 64")
        return value

    @model_validator(mode="after")
    def _ep_divides_tp(self) -> BuildOptions:
        if self.tp_size % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide tp_size {self.tp_size}")
        return self

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(self.tp_size, self.pp_size, self.ep_size)

    @property
    def resolved_dtype(self) -> Literal["float16", "bfloat16"]:
        return self.dtype or "float16"

    @property
    def resolved_weights(self) -> Literal["embedded", "external"]:
        return self.weights or "embedded"

    @property
    def resolved_kv_cache_dtype(self) -> Literal["auto", "int8"]:
        return self.kv_cache_dtype or "auto"

    @property
    def resolved_tokens_per_block(self) -> int:
        return self.tokens_per_block or _DEFAULT_TOKENS_PER_BLOCK

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

    def what_is_built(self) -> dict[str, Any]:
        """The settings that decide what the engine is, for the name of its artifact; not how it is built."""
        return self.model_dump(mode="json", exclude=set(_HOW_NOT_WHAT))


def _no_such_sm(sm: int, target: str) -> str:
    legal = ", ".join(map(str, TARGETS[target].sms))
    if target == "tensorrt-rtx" and sm in TARGETS["tensorrt"].sms:
        return (
            f"tensorrt-rtx compiles for {legal}; for sm{sm} set build.target to tensorrt, on a machine with such a GPU"
        )
    return f"{sm} is no compute capability that {target} compiles for; expected some of {legal}"
