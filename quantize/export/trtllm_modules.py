"""The modules of a unified checkpoint, the linears that each is made of, and the scheme of each.

A stage of the pipeline counts its layers from 0, and the configuration names modules as a stage does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plansmith_errors import ExportError
from quantize.export.scheme import LinearScheme
from quantize.export.source import ExportSource
from quantize.export.trtllm_schemes import AWQ, MIXED_PRECISION, WHOLE_BLOCKS, ModuleScheme, module_scheme
from quantize.model_shape import QKV, ModelShape
from quantize.parallel import Mapping

_ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention.qkv", QKV),
    ("attention.dense", ("self_attn.o_proj",)),
)
_MLP: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mlp.fc", ("mlp.gate_proj",)),
    ("mlp.gate", ("mlp.up_proj",)),
    ("mlp.proj", ("mlp.down_proj",)),
)


def layer_modules(shape: ModelShape, layer: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names within "transformer.layers.i.", and the linears of each; of experts one after the other, up before gate."""
    mixture = shape.mixture
    if mixture is None or not mixture.sparse_layers[layer]:
        return _ATTENTION + _MLP
    up_and_gate = tuple(module for expert in mixture.experts for module in (expert.up, expert.gate))
    return *_ATTENTION, ("mlp.fc", up_and_gate), ("mlp.proj", tuple(expert.down for expert in mixture.experts))


def stage_layers(shape: ModelShape, mapping: Mapping) -> Iterator[tuple[int, int]]:
    """(number within its stage, number in the model) of every decoder layer."""
    for pp_rank in range(mapping.pp_size):
        yield from enumerate(mapping.layers_of(pp_rank, shape.num_layers))


@dataclass(frozen=True)
class ModulePlan:
    """``schemes``: of every linear module of the decoder, by the name that it has in its stage."""

    schemes: dict[str, ModuleScheme]

    @property
    def quantized(self) -> list[ModuleScheme]:
        """Each scheme once, in the order of use."""
        return list(dict.fromkeys(own for own in self.schemes.values() if own.algorithm is not None))

    @property
    def algorithm(self) -> str | None:
        """quant_algo of the model."""
        found = self.quantized
        return MIXED_PRECISION if len(found) > 1 else found[0].algorithm if found else None

    @property
    def int4_group(self) -> int | None:
        """The largest group of INT4 weights."""
        return max((own.group_size for own in self.quantized if own.algorithm in AWQ), default=None)

    @property
    def has_nvfp4(self) -> bool:
        return any(own.algorithm == "NVFP4" for own in self.quantized)

    @property
    def unquantized(self) -> list[str]:
        """Names of the modules that stay as they are in a model that is quantized."""
        return [name for name, own in self.schemes.items() if own.algorithm is None] if self.quantized else []

    @property
    def excluded(self) -> list[str]:
        """What ``exclude_modules`` has to name: experts are quantized as the whole that is called ``mlp``."""
        names = [name if _block(name) not in self._experts else _block(name) for name in self.unquantized]
        return list(dict.fromkeys([*names, *(["*router"] if self._experts else [])]))

    @property
    def _experts(self) -> set[str]:
        """The blocks that hold experts: a dense one has a gate of its own."""
        blocks = {_block(name) for name in self.schemes if name.endswith(".mlp.proj")}
        return blocks - {_block(name) for name in self.schemes if name.endswith(".mlp.gate")}

    def scheme_of(self, module: str) -> ModuleScheme:
        """Of any module; embeddings, norms, routers and the head are not quantized."""
        return self.schemes.get(module, ModuleScheme())


def plan_modules(source: ExportSource, mapping: Mapping) -> ModulePlan:
    """Raises ExportError for a mix of schemes that the format cannot say."""
    found: dict[str, tuple[int, ModuleScheme]] = {}
    for local, layer in stage_layers(source.shape, mapping):
        for name, modules in layer_modules(source.shape, layer):
            key = f"transformer.layers.{local}.{name}"
            own = _common_scheme(source, [f"model.layers.{layer}.{module}.weight" for module in modules])
            other, expected = found.setdefault(key, (layer, own))
            if own != expected:
                raise ExportError(
                    f"layers {other} and {layer} of the model are both layer {local} of their pipeline stage, and "
                    f"their {name} have different schemes, which TensorRT-LLM 1.2 names by the number within the "
                    "stage; take --pp 1, or the same rule for both"
                )
    plan = ModulePlan(_same_factors({name: own for name, (_, own) in found.items()}))
    _check_mix(source, plan)
    return plan


def _common_scheme(source: ExportSource, weights: list[str]) -> ModuleScheme:
    first: LinearScheme = source.schemes[weights[0]]
    other = next((name for name in weights if source.schemes[name] != first), None)
    if other is not None:
        raise ExportError(
            f"{weights[0]!r} is {first} but {other!r} is {source.schemes[other]}; TensorRT-LLM 1.2 stores them as one "
            "tensor; give both the same rule in the recipe"
        )
    own = module_scheme(first)
    if own is None:
        raise ExportError(f"{weights[0]!r} is {first}, which a unified checkpoint does not have")
    if own.algorithm == "NVFP4":
        _check_tensor_scales(source, weights)
    return own


def _check_tensor_scales(source: ExportSource, weights: list[str]) -> None:
    scales = {name: source.weight(name).tensor_scale for name in weights}
    other = next((name for name, scale in scales.items() if scale != scales[weights[0]]), None)
    if other is not None:
        raise ExportError(
            f"{weights[0]!r} and {other!r} have different weight_scale_2, and TensorRT-LLM 1.2 has one for both; "
            "quantize the model again from its original"
        )


def _same_factors(schemes: dict[str, ModuleScheme]) -> dict[str, ModuleScheme]:
    """Whether factors of the inputs are stored is said once for an algorithm: then every module of it has some."""
    with_factors = {(own.algorithm, own.group_size) for own in schemes.values() if own.has_prequant}
    return {
        name: replace(own, has_prequant=(own.algorithm, own.group_size) in with_factors)
        for name, own in schemes.items()
    }


def _check_mix(source: ExportSource, plan: ModulePlan) -> None:
    whole = next((own.algorithm for own in plan.quantized if own.algorithm in WHOLE_BLOCKS), None)
    if whole is not None and (plan.algorithm == MIXED_PRECISION or plan.unquantized):
        names = ", ".join(str(own.algorithm) for own in plan.quantized)
        kept = f"{source.unquantized_modules[0]} and others are not quantized" if plan.unquantized else f"found {names}"
        raise ExportError(
            f"{kept}, but {whole} of TensorRT-LLM 1.2 has to be the one scheme for all linears; take a recipe without "
            "such overrides, or the recipe fp8-static"
        )
    if source.shape.mixture is None:
        return
    if plan.algorithm == MIXED_PRECISION:
        raise ExportError(
            "models with experts have one scheme in TensorRT-LLM 1.2, found several; take a recipe without overrides "
            "of the scheme"
        )
    half = next((name for name in plan.unquantized if plan.scheme_of(_other_half(name)).algorithm is not None), None)
    if half is not None:
        raise ExportError(
            f"{half} is not quantized but {_other_half(half)} is; TensorRT-LLM 1.2 quantizes all linears of the "
            "experts of a layer or none; give all of them the same rule"
        )


def _block(module: str) -> str:
    return module.rpartition(".")[0]


def _other_half(module: str) -> str:
    """``mlp.fc`` of ``mlp.proj`` and the other way round; no module's name for any other."""
    other = {"fc": "proj", "proj": "fc"}.get(module.rpartition(".")[2], "")
    return f"{_block(module)}.{other}"
