"""Names, types and shapes of a TensorRT-LLM unified checkpoint: rankN.safetensors of every rank.

https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html and tensorrt_llm/models/modeling_utils.py (1.2).
Linears are stored [out, in]. ``mlp.fc`` is Hugging Face's gate_proj and ``mlp.gate`` its up_proj; of experts ``mlp.fc``
[experts, 2 * out, in] is up and gate, one above the other (tensorrt_llm/layers/moe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantize.activations import kv_scale_name
from quantize.export.trtllm_modules import layer_modules, stage_layers
from quantize.export.trtllm_schemes import SQ_PLUGIN, SQ_TOKEN_PLUGIN, ModuleScheme, Part, linear_parts
from quantize.model_shape import EMBEDDINGS, FINAL_NORM, LM_HEAD, Linear, ModelShape
from quantize.parallel import Mapping, is_row_split
from quantize.safetensors_writer import TensorSpec

EXCLUDED = ("lm_head", "transformer.vocab_embedding", "transformer.ln_f")
KV_SCALE = "attention.kv_cache_scaling_factor"
_NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
_QK_NORMS = {"attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm"}
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Module:
    """One module of a rank. ``sources``: the weights that it is made of, by their names in the model, of ``members``.

    ``scaled_with``: the weights whose FP8 scale is one and the same, because the builder may multiply them as one.
    """

    name: str
    own: ModuleScheme
    sources: tuple[str, ...]
    members: tuple[Linear, ...]
    scaled_with: tuple[str, ...]
    num_experts: int = 0  # 0: a dense linear

    @property
    def experts(self) -> list[Module]:
        """Each expert as a module of its own, in order."""
        share = len(self.sources) // self.num_experts
        cuts = [slice(begin, begin + share) for begin in range(0, len(self.sources), share)]
        return [
            replace(
                self, sources=self.sources[cut], members=self.members[cut], scaled_with=self.sources[cut], num_experts=0
            )
            for cut in cuts
        ]


@dataclass(frozen=True)
class RankTensor:
    """One tensor of a rank. ``part``: the suffix of a module's tensor, or "whole", "head", "router", "one" or "kv".

    ``sources``: the tensors of the model that it is made of, but for a module's parts.
    """

    spec: TensorSpec
    part: str
    sources: tuple[str, ...] = ()
    module: Module | None = None
    is_scale: bool = False


@dataclass(frozen=True)
class RankLayout:
    """``scheme_of``: of a module, by the name that it has in its stage."""

    shape: ModelShape
    mapping: Mapping
    dtype: np.dtype[Any]  # of everything that is not quantized
    scheme_of: Callable[[str], ModuleScheme]
    has_kv_scales: bool = False

    def tensors(self, rank: int) -> Iterator[RankTensor]:
        """Every tensor of ``rank``, in the order of use; layers count from 0 on each pipeline stage."""
        pp_rank, tp_rank = divmod(rank, self.mapping.tp_size)
        if pp_rank == 0:
            yield self._whole("transformer.vocab_embedding.weight", EMBEDDINGS, self._embedding_shape)
        for local, layer in enumerate(self.mapping.layers_of(pp_rank, self.shape.num_layers)):
            yield from self._layer(f"transformer.layers.{local}.", layer, tp_rank)
        if pp_rank == self.mapping.pp_size - 1:
            yield self._whole("transformer.ln_f.weight", FINAL_NORM, (self.shape.hidden_size,))
            yield self._head()

    def modules(self) -> Iterator[Module]:
        """Every linear module of the decoder, by the names of the stages."""
        for local, layer in stage_layers(self.shape, self.mapping):
            yield from self._modules(f"transformer.layers.{local}.", layer)

    @property
    def _embedding_shape(self) -> tuple[int, int]:
        return self.shape.vocab_size, self.shape.hidden_size

    def _whole(self, name: str, source: str, shape: tuple[int, ...]) -> RankTensor:
        return RankTensor(TensorSpec(name, self.dtype, shape), "whole", (source,))

    def _head(self) -> RankTensor:
        # Tied weights are written twice: a later pipeline stage has no embeddings to share, and the head is padded.
        rows = self.mapping.padded_vocab(self.shape.vocab_size) // self.mapping.tp_size
        source = EMBEDDINGS if self.shape.is_tied else LM_HEAD
        return RankTensor(TensorSpec("lm_head.weight", self.dtype, (rows, self.shape.hidden_size)), "head", (source,))

    def _layer(self, prefix: str, layer: int, tp_rank: int) -> Iterator[RankTensor]:
        source = f"model.layers.{layer}."
        norms = _NORMS | (_QK_NORMS if self.shape.qk_norm else {})
        for name, norm in norms.items():
            yield self._whole(f"{prefix}{name}.weight", f"{source}{norm}.weight", (self.shape.norms[norm],))
        mixture = self.shape.mixture
        if mixture is not None and mixture.sparse_layers[layer]:
            size = (mixture.num_experts, self.shape.hidden_size)
            spec = TensorSpec(f"{prefix}mlp.router.weight", _FLOAT32, size)
            yield RankTensor(spec, "router", (f"{source}{mixture.router}.weight",))
        yield from self._smooth_quant(prefix)
        for module in self._modules(prefix, layer):
            yield from self._module(module, tp_rank)
        if self.has_kv_scales:
            names = (kv_scale_name(f"{source}self_attn.{module}.weight") for module in ("k_proj", "v_proj"))
            spec = TensorSpec(prefix + KV_SCALE, _FLOAT32, (1,))
            yield RankTensor(spec, "kv", tuple(name for name in names if name), is_scale=True)

    def _smooth_quant(self, prefix: str) -> Iterator[RankTensor]:
        """What the plugins of W8A8 read of norms, attention and MLP."""
        algorithm = self.scheme_of(f"{prefix}attention.qkv").algorithm
        if algorithm not in (SQ_PLUGIN, SQ_TOKEN_PLUGIN):
            return
        for norm in _NORMS:
            yield RankTensor(TensorSpec(f"{prefix}{norm}.scale_to_int", self.dtype, (1,)), "one", is_scale=True)
        if algorithm == SQ_PLUGIN:
            for block in ("attention", "mlp"):
                spec = TensorSpec(f"{prefix}{block}.quantization_scaling_factor", _FLOAT32, (1,))
                yield RankTensor(spec, "one", is_scale=True)

    def _modules(self, prefix: str, layer: int) -> Iterator[Module]:
        linears = {linear.module: linear for linear in self.shape.linears_of(layer)}
        names = dict(layer_modules(self.shape, layer))
        num_experts = 0 if self.shape.mixture is None or "mlp.gate" in names else self.shape.mixture.num_experts
        for name, modules in names.items():
            sources = _weights(layer, modules)
            # Of a dense MLP: the builder fuses both where they are FP8.
            is_gated = name in ("mlp.fc", "mlp.gate") and "mlp.gate" in names
            scaled_with = _weights(layer, names["mlp.fc"] + names["mlp.gate"]) if is_gated else sources
            members = tuple(linears[module] for module in modules)
            experts = num_experts if name.startswith("mlp.") else 0
            yield Module(prefix + name, self.scheme_of(prefix + name), sources, members, scaled_with, experts)

    def _module(self, module: Module, tp_rank: int) -> Iterator[RankTensor]:
        first = module.experts[0] if module.num_experts else module
        cuts = [self.mapping.slices(linear, self.shape, tp_rank) for linear in first.members]
        rows = sum(cut[0].stop - cut[0].start for cut in cuts)
        columns = cuts[0][1].stop - cuts[0][1].start
        is_row = is_row_split(first.members[0].module)
        for part in linear_parts(module.own, rows, columns, self.dtype, is_row_split=is_row):
            shape = _of_experts(part, module.num_experts)
            spec = TensorSpec(f"{module.name}.{part.suffix}", part.dtype, shape)
            yield RankTensor(spec, part.suffix, module=module, is_scale=part.is_scale)
        if first.members[0].has_bias:
            biases = tuple(name.replace(".weight", ".bias") for name in module.sources)
            yield RankTensor(TensorSpec(f"{module.name}.bias", self.dtype, (rows,)), "bias", biases, module)


def _weights(layer: int, modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{module}.weight" for module in modules)


def _of_experts(part: Part, num_experts: int) -> tuple[int, ...]:
    """Shape of the part where it is stacked over experts: all of them have one scale for their inputs."""
    if num_experts == 0 or part.suffix == "activation_scaling_factor":
        return part.shape
    return (num_experts, *part.shape)
