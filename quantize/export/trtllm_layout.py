"""Names, types and shapes of a TensorRT-LLM unified checkpoint: rankN.safetensors of every rank.

https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html and tensorrt_llm/models/modeling_utils.py (1.2).
Linears are stored [out, in]. ``mlp.fc`` is Hugging Face's gate_proj and ``mlp.gate`` its up_proj.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quantize.dtypes import FLOAT8_E4M3
from quantize.export.scheme import LinearScheme
from quantize.model_shape import EMBEDDINGS, FINAL_NORM, LM_HEAD, QKV, Linear, ModelShape
from quantize.parallel import Mapping
from quantize.safetensors_writer import TensorSpec

LINEARS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention.qkv", QKV),
    ("attention.dense", ("self_attn.o_proj",)),
    ("mlp.fc", ("mlp.gate_proj",)),
    ("mlp.gate", ("mlp.up_proj",)),
    ("mlp.proj", ("mlp.down_proj",)),
)
NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
SCALE_NAMES = {"int4": "weights_scaling_factor", "fp8": "per_channel_scale"}
EXCLUDED = ("lm_head", "transformer.vocab_embedding", "transformer.ln_f")

Part = Literal["weight", "scale", "bias", "whole", "head"]


@dataclass(frozen=True)
class RankTensor:
    """One tensor of a rank, and the Hugging Face tensors that it is made of."""

    spec: TensorSpec
    part: Part
    sources: tuple[str, ...]
    members: tuple[Linear, ...] = ()  # the linears of ``sources``


@dataclass(frozen=True)
class RankLayout:
    shape: ModelShape
    scheme: LinearScheme
    mapping: Mapping
    dtype: np.dtype[Any]  # of everything that is not quantized

    def tensors(self, rank: int) -> Iterator[RankTensor]:
        """Every tensor of ``rank``, in the order of use; layers count from 0 on each pipeline stage."""
        pp_rank, tp_rank = divmod(rank, self.mapping.tp_size)
        if pp_rank == 0:
            yield self._whole("transformer.vocab_embedding.weight", EMBEDDINGS, self._embedding_shape)
        for local, layer in enumerate(self.mapping.layers_of(pp_rank, self.shape.num_layers)):
            yield from self._layer(f"transformer.layers.{local}.", f"model.layers.{layer}.", tp_rank)
        if pp_rank == self.mapping.pp_size - 1:
            yield self._whole("transformer.ln_f.weight", FINAL_NORM, (self.shape.hidden_size,))
            yield self._head()

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

    def _layer(self, prefix: str, source: str, tp_rank: int) -> Iterator[RankTensor]:
        for name, norm in NORMS.items():
            yield self._whole(f"{prefix}{name}.weight", f"{source}{norm}.weight", (self.shape.hidden_size,))
        by_module = {linear.module: linear for linear in self.shape.linears}
        for name, modules in LINEARS:
            members = tuple(by_module[module] for module in modules)
            yield from self._linear(prefix + name, source, members, tp_rank)

    def _linear(self, name: str, source: str, members: tuple[Linear, ...], tp_rank: int) -> Iterator[RankTensor]:
        cuts = [self.mapping.slices(linear, self.shape, tp_rank) for linear in members]
        rows = sum(cut[0].stop - cut[0].start for cut in cuts)
        columns = cuts[0][1].stop - cuts[0][1].start
        sources = tuple(f"{source}{linear.module}.weight" for linear in members)
        yield RankTensor(self._weight_spec(name, rows, columns), "weight", sources, members)
        if self.scheme.name in SCALE_NAMES:
            group = self.scheme.group_size
            shape = (rows,) if group is None else (rows, columns // group)
            spec = TensorSpec(f"{name}.{SCALE_NAMES[self.scheme.name]}", np.dtype(np.float32), shape)
            yield RankTensor(spec, "scale", sources, members)
        if members[0].has_bias:
            biases = tuple(f"{source}{linear.module}.bias" for linear in members)
            yield RankTensor(TensorSpec(f"{name}.bias", self.dtype, (rows,)), "bias", biases, members)

    def _weight_spec(self, name: str, rows: int, columns: int) -> TensorSpec:
        if self.scheme.name == "int4":
            return TensorSpec(f"{name}.weight", np.dtype(np.int8), (rows // 2, columns))
        dtype = FLOAT8_E4M3 if self.scheme.name == "fp8" else self.dtype
        return TensorSpec(f"{name}.weight", dtype, (rows, columns))
