"""How weights, keys and values are stored, and in which format the tensor cores multiply them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from builder.planner.gpu import Gpu, MathFormat
from builder.targets.tensorrt.legality import RTX_TYPES
from plansmith_errors import ConfigError
from quantize.architectures import Role
from quantize.dtypes import BFLOAT16
from quantize.plan import rule_for
from quantize.recipe import Recipe
from quantize.recipe_files import RecipeSource, list_recipes, load_recipe
from quantize.weight_rule import WeightRule

KvFormat = Literal["fp16", "bf16", "fp8", "int8"]
KV_BYTES: dict[KvFormat, int] = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}  # scales are of whole tensors
_FLOATS = {"fp16": "float16", "bf16": "bfloat16"}
# Words shorter than the recipes' names. int4 in groups of 64 without zero points: what divides most models.
_RECIPES = {"int4": "int4-awq"}
_MATH: dict[str, MathFormat] = {"fp8": "fp8", "mxfp8": "fp8"}  # inputs are rounded as the engine runs
_MATH_OF_INPUTS: dict[str, MathFormat] = {"fp8": "fp8", "int8": "int8", "nvfp4": "fp4"}
WEIGHT_WORDS = (*_FLOATS, *_RECIPES)


@dataclass(frozen=True, eq=False)
class Precision:
    """``label`` names it for a reader. ``stored``: rules of single matrices of a checkpoint that is quantized."""

    label: str
    recipe: Recipe
    kv_cache: KvFormat
    floats: Literal["float16", "bfloat16"] = "bfloat16"  # of what is not quantized
    stored: Mapping[str, WeightRule] = field(default_factory=dict)

    def rule(self, name: str, role: Role) -> WeightRule:
        """How the matrix ``name`` of the checkpoint is stored."""
        return self.stored.get(name) or rule_for(name, role, self.recipe)

    @cached_property
    def differs_by_name(self) -> bool:
        """Whether matrices of one kind may be stored in different ways, by layer or by expert."""
        return bool(self.stored or self.recipe.overrides)

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """Every rule that a linear may have."""
        return (self.recipe.linears, *self.recipe.overrides, *self.stored.values())

    @property
    def kept_dtype(self) -> np.dtype[Any]:
        """Of matrices that are not quantized. A float32 source is planned in 16 bits, as GPU engines compute."""
        if self.recipe.keep_dtype == "float32":
            return np.dtype(np.float32)
        name = self.floats if self.recipe.keep_dtype == "source" else self.recipe.keep_dtype
        return BFLOAT16 if name == "bfloat16" else np.dtype(np.float16)

    @property
    def kv_bytes(self) -> int:
        """Of one element of the KV cache."""
        return KV_BYTES[self.kv_cache]

    @property
    def float_math(self) -> MathFormat:
        return "bf16" if self.kept_dtype == BFLOAT16 else "fp16"

    def math(self, rule: WeightRule) -> MathFormat:
        """What the tensor cores would multiply matrices of ``rule`` in, on a GPU that has the format."""
        if rule.activations is not None:
            return _MATH_OF_INPUTS[rule.activations]
        return _MATH.get(rule.scheme, self.float_math)


def resolve_recipe(weights: str) -> tuple[Recipe, Literal["float16", "bfloat16"] | None]:
    """A word such as fp8 or int4, a recipe's name or the path of one; and the type of floats, where the word says it.

    Raises ConfigError.
    """
    if weights in _FLOATS:
        return load_recipe("none"), "float16" if weights == "fp16" else "bfloat16"
    name = _RECIPES.get(weights, weights)
    if name not in list_recipes() and not name.endswith((".yaml", ".yml")):
        raise ConfigError(f"--weights {weights!r} is unknown; expected {', '.join([*WEIGHT_WORDS, *list_recipes()])}")
    return sized_recipe(name), None


def sized_recipe(source: RecipeSource) -> Recipe:
    """A recipe whose sizes are known before it is applied. Raises ConfigError for one that must measure first."""
    recipe = load_recipe(source)
    if recipe.auto is not None and recipe.auto.budget.bits_per_weight is None:
        raise ConfigError(
            f"recipe {recipe.name!r}: auto.budget.{recipe.auto.budget.key} says no size before it is measured; plan "
            "the quantized checkpoint, or give --weights"
        )
    return recipe


def missing_formats(precision: Precision, gpu: Gpu) -> list[MathFormat]:
    """Formats of the recipe that the GPU's tensor cores do not multiply: such products run in 16 bits."""
    found = dict.fromkeys(precision.math(rule) for rule in precision.rules)
    return [math for math in found if math not in gpu.tflops and math != "fp16"]


def uncompiled_schemes(precision: Precision, gpu: Gpu) -> list[str]:
    """Schemes of weights that TensorRT-RTX does not compile for the GPU, where it compiles for it at all."""
    known = RTX_TYPES.get(gpu.sm)
    found = dict.fromkeys(rule.scheme for rule in precision.rules if rule.scheme != "none")
    return [] if known is None else [scheme for scheme in found if scheme not in known]
