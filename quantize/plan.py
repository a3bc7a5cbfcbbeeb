"""What a recipe means for one checkpoint: a scheme for every tensor, checked before any work is done."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from plansmith_errors import QuantizeError
from quantize.architectures import Role, check_complete, fused_set, role_of
from quantize.checkpoint import Checkpoint, TensorInfo
from quantize.dtypes import BFLOAT16, SOURCE_FLOATS
from quantize.foreign.packed_weight import PackedWeight
from quantize.quantized_tensor import QUANT_METHOD
from quantize.recipe import Recipe
from quantize.safetensors_writer import TensorSpec
from quantize.stored_specs import companion_specs, stored_specs
from quantize.weight_rule import FloatSettings, InputSettings, Int4Settings, SchemeName, WeightRule

log = logging.getLogger(__name__)
_KEPT = WeightRule(scheme="none")


@dataclass(frozen=True)
class PlannedTensor:
    info: TensorInfo
    scheme: SchemeName
    int4: Int4Settings | None
    specs: tuple[TensorSpec, ...]  # what is stored, scales at their largest type
    floats: FloatSettings | None = None
    scaled_with: tuple[str, ...] = ()  # whose largest magnitude decides the tensor's scale, where it has one
    inputs: InputSettings | None = None  # what happens to the inputs of the linear
    companions: tuple[TensorSpec, ...] = ()  # stored after ``specs``, with values that calibration finds
    kept: PackedWeight | None = None  # the source's own, where it has the scheme already

    @property
    def is_calibrated(self) -> bool:
        """Whether something of it waits for calibration."""
        return (self.int4 is not None and self.int4.is_calibrated) or self.is_smoothed or bool(self.companions)

    @property
    def is_smoothed(self) -> bool:
        return self.inputs is not None and self.inputs.smoothing is not None

    @property
    def folds_smoothing(self) -> bool:
        """Whether the factors go into the module that writes the input."""
        return self.inputs is not None and self.inputs.fold_smoothing

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in (*self.specs, *self.companions))


def plan_tensors(checkpoint: Checkpoint, recipe: Recipe) -> list[PlannedTensor]:
    """A plan for each tensor, in the order of the checkpoint. Raises QuantizeError or CheckpointError."""
    _refuse_quantized(checkpoint)
    check_complete(checkpoint)
    _check_tied(checkpoint, recipe)
    _check_overrides(checkpoint, recipe)
    planned = []
    for info in checkpoint:
        role = role_of(info.name)
        if role == "derived" or (role == "lm_head" and checkpoint.is_tied):
            log.warning("%s: %s is left out; config.json gives the same", checkpoint.path, info.name)
        elif role is not None:
            planned.append(_plan_tensor(checkpoint, info, role, recipe))
    return _share_scales(planned)


def with_rules(
    checkpoint: Checkpoint, planned: Sequence[PlannedTensor], recipe: Recipe, rules: Mapping[str, WeightRule]
) -> list[PlannedTensor]:
    """The plan with other rules for the linears named in ``rules``. Raises QuantizeError where one does not fit."""
    return _share_scales(
        [
            _plan_tensor(checkpoint, tensor.info, "linear", recipe, rules[tensor.info.name])
            if tensor.info.name in rules
            else tensor
            for tensor in planned
        ]
    )


def split_shards(planned: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Fill shards in order; a tensor stays together with its scales."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _share_scales(planned: list[PlannedTensor]) -> list[PlannedTensor]:
    """Tensors that run-times fuse share nvfp4's scale of the tensor; of fp8 where the recipe says so."""
    nvfp4 = {tensor.info.name for tensor in planned if tensor.scheme == "nvfp4"}
    sharing = {tensor.info.name for tensor in planned if tensor.floats is not None and tensor.floats.share_scale}
    shared = []
    for tensor in planned:
        name, floats = tensor.info.name, tensor.floats
        if name in nvfp4:
            tensor = replace(tensor, scaled_with=tuple(other for other in fused_set(name) if other in nvfp4))
        elif floats is not None and floats.granularity == "tensor":
            others = tuple(other for other in fused_set(name) if other in sharing)
            tensor = replace(tensor, scaled_with=others if name in sharing else (name,))
        shared.append(tensor)
    return shared


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    method = checkpoint.config.get("quantization_config")
    name = method.get("quant_method") if isinstance(method, dict) else None
    if name == QUANT_METHOD:
        raise QuantizeError(f"{checkpoint.path}: is already a quantized checkpoint; quantize the original model")
    if method:
        raise QuantizeError(f"{checkpoint.path}: is quantized already ({name}); quantize the original model")


def _check_tied(checkpoint: Checkpoint, recipe: Recipe) -> None:
    head = recipe.lm_head or recipe.embeddings
    embeddings = recipe.embeddings
    if checkpoint.is_tied and (head.scheme, head.int4, head.floats) != (
        embeddings.scheme,
        embeddings.int4,
        embeddings.floats,
    ):
        raise QuantizeError(
            f"recipe {recipe.name!r}: lm_head is {head.scheme} and embeddings are {embeddings.scheme}, but this "
            "model's head is its embedding matrix; give both the same rule, or leave lm_head out"
        )


def _check_overrides(checkpoint: Checkpoint, recipe: Recipe) -> None:
    matrices = [info.name for info in checkpoint if len(info.shape) == 2]
    quantized = [name for name in matrices if role_of(name) != "router"]
    for override in recipe.overrides:
        candidates = matrices if override.scheme == "none" else quantized
        if not any(fnmatchcase(name, override.match) for name in candidates):
            raise QuantizeError(
                f"recipe {recipe.name!r}: the override {override.match!r} matches no matrix that is quantized; "
                f"names look like {quantized[-1]!r}"
            )


def _plan_tensor(
    checkpoint: Checkpoint, info: TensorInfo, role: Role, recipe: Recipe, chosen: WeightRule | None = None
) -> PlannedTensor:
    dtype = checkpoint.kept_dtype(info.name)
    if dtype.name not in SOURCE_FLOATS:
        raise QuantizeError(f"tensor {info.name!r} is {dtype.name}, expected one of {', '.join(SOURCE_FLOATS)}")
    num_dims = 1 if role == "vector" else 2
    if len(info.shape) != num_dims or 0 in info.shape:
        raise QuantizeError(
            f"tensor {info.name!r} has shape {list(info.shape)}, expected {num_dims} dimensions of at least 1"
        )
    if role == "vector":
        return PlannedTensor(info, "none", None, (TensorSpec(info.name, dtype, info.shape),))
    rule = chosen or rule_for(info.name, role, recipe)
    if role != "linear" and rule.int4 is not None and rule.int4.is_calibrated:
        raise QuantizeError(
            f"tensor {info.name!r}: method {rule.method} is for the linears of decoder layers; use rtn here"
        )
    if role != "linear" and rule.inputs is not None:
        raise QuantizeError(f"tensor {info.name!r}: activations are for the linears of decoder layers; give none here")
    if rule.scheme == "none" and recipe.keep_dtype != "source":
        dtype = BFLOAT16 if recipe.keep_dtype == "bfloat16" else np.dtype(recipe.keep_dtype)
    companions = companion_specs(info, rule.inputs, recipe.kv_cache) if role == "linear" else ()
    specs = stored_specs(info, rule, dtype)
    int4 = None if rule.int4 is None else rule.int4.for_columns(info.shape[1])
    return PlannedTensor(info, rule.scheme, int4, specs, rule.floats, inputs=rule.inputs, companions=companions)


def rule_for(name: str, role: Role, recipe: Recipe) -> WeightRule:
    """How the recipe stores the matrix ``name``, while an automatic choice is not made."""
    if role == "router":  # a token sent to the wrong experts costs more than these few weights could save
        return _KEPT
    for override in reversed(recipe.overrides):
        if fnmatchcase(name, override.match):
            return override
    if role == "embeddings":
        return recipe.embeddings
    return recipe.lm_head or recipe.embeddings if role == "lm_head" else recipe.linears
