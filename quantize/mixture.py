"""Mixture of experts: which layers have experts, how many, and what their modules are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from plansmith_errors import CheckpointError

MIXTURE_TYPES = ("mixtral", "qwen3_moe")
_MOST_EXPERTS = 1_000_000  # of a whole model: a damaged config must not make us list tensors for ever


class Expert(NamedTuple):
    """Module names within a decoder layer: ``down(silu(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Mixture:
    """A router gives each token ``experts_per_token`` of a layer's ``num_experts`` experts, each a gated MLP.

    Its weights are the softmax over all experts, divided by the sum of the chosen ones where ``normalizes``
    (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388).
    """

    block: str  # module name within a decoder layer
    projections: Expert  # names within an expert
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalizes: bool
    sparse_layers: tuple[bool, ...]  # of each decoder layer, whether it has experts; the others are dense

    @property
    def router(self) -> str:
        """The linear [num_experts, hidden_size] that chooses."""
        return f"{self.block}.gate"

    @property
    def share_of_tokens(self) -> float:
        """Of one expert, on average."""
        return self.experts_per_token / self.num_experts

    def expert_name(self, index: int) -> str:
        return f"{self.block}.experts.{index}"

    def expert(self, index: int) -> Expert:
        return Expert(*(f"{self.expert_name(index)}.{projection}" for projection in self.projections))

    @property
    def experts(self) -> list[Expert]:
        """Of one layer, in order."""
        return [self.expert(index) for index in range(self.num_experts)]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str) -> Mixture | None:
        """None for a dense model. ``source`` names the config in errors. Raises CheckpointError."""
        model_type = config.get("model_type")
        if model_type not in MIXTURE_TYPES:
            return None
        is_mixtral = model_type == "mixtral"
        num_layers = _count(config, "num_hidden_layers", source)
        # transformers 5 writes num_local_experts for Qwen3 as well.
        key = "num_experts" if not is_mixtral and config.get("num_experts") is not None else "num_local_experts"
        num_experts = _count(config, key, source)
        if num_layers * num_experts > _MOST_EXPERTS:
            raise CheckpointError(
                f"{source}: {key} is {num_experts} and num_hidden_layers is {num_layers}; more than {_MOST_EXPERTS} "
                "experts are taken for a damaged config"
            )
        experts_per_token = _count(config, "num_experts_per_tok", source)
        if experts_per_token > num_experts:
            raise CheckpointError(
                f"{source}: num_experts_per_tok is {experts_per_token}, expected at most {key}, which is {num_experts}"
            )
        return cls(
            block="block_sparse_moe" if is_mixtral else "mlp",
            projections=Expert("w1", "w3", "w2") if is_mixtral else Expert("gate_proj", "up_proj", "down_proj"),
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=_count(config, "intermediate_size" if is_mixtral else "moe_intermediate_size", source),
            normalizes=is_mixtral or _flag(config, "norm_topk_prob", source),
            sparse_layers=(True,) * num_layers if is_mixtral else _sparse_layers(config, num_layers, source),
        )


def _sparse_layers(config: Mapping[str, Any], num_layers: int, source: str) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    step = 1 if config.get("decoder_sparse_step") is None else _count(config, "decoder_sparse_step", source)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"{source}: mlp_only_layers is {dense!r}, expected a list of layer numbers")
    excluded = set(dense)
    return tuple((layer + 1) % step == 0 and layer not in excluded for layer in range(num_layers))


def _count(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{source}: {key} is {value!r}, expected a positive integer")
    return value


def _flag(config: Mapping[str, Any], key: str, source: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} is {value!r}, expected true or false")
    return bool(value)
