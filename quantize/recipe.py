"""Recipes: which scheme each weight matrix gets, and what happens to the inputs of the linears."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantize.activations import KvScheme
from quantize.calibration.settings import CalibrationSettings
from quantize.sensitivity.settings import Budget, Sensitivity
from quantize.weight_rule import WeightRule

Rotation = Literal["r1", "r2"]
KeepDtype = Literal["source", "float32", "float16", "bfloat16"]


class Override(WeightRule):
    """A rule for the weights whose names match a pattern of fnmatch. The last override that matches wins."""

    match: Annotated[str, Field(min_length=1, description="for example '*.down_proj.weight'")]


class Auto(BaseModel):
    """Linears whose rule is chosen by what each candidate costs the model. Overrides come before the choice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidates: Annotated[tuple[WeightRule, ...], Field(min_length=2)] = Field(
        description="rules to choose from, one for each set of linears that run-times fuse"
    )
    budget: Budget
    sensitivity: Sensitivity = Field(
        default="kl",
        description="how the cost of a candidate is measured. kl: KL divergence of the model with one set quantized; "
        "output: error of the layer's output, cheaper; weights: error of the values, without any text",
    )
    # Two windows of another text find the sensitive layers as well as many do; docs/mixed-precision.md has the numbers.
    num_samples: int = Field(default=2, strict=True, ge=1, description="windows of the calibration text to measure on")
    sequence_length: int = Field(default=256, strict=True, ge=2, description="tokens per window")

    @model_validator(mode="after")
    def _budget_is_measured(self) -> Auto:
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError("two candidates are the same; name each once")
        if self.budget.measure not in (None, self.sensitivity):
            raise ValueError(
                f"a budget of {self.budget.key} is measured by sensitivity {self.budget.measure}, "
                f"not {self.sensitivity}; change one of them"
            )
        return self


class Recipe(BaseModel):
    """A quantization recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    linears: WeightRule = Field(description="left out where auto chooses")
    auto: Auto | None = Field(default=None, description="the rule of each linear by measured sensitivity and a budget")
    embeddings: WeightRule = Field(default=WeightRule(scheme="none"), description="of a model with a tied head: both")
    lm_head: WeightRule | None = Field(default=None, description="default: as the embeddings")
    overrides: tuple[Override, ...] = ()
    keep_dtype: KeepDtype = Field(
        default="source", description="type of the matrices whose scheme is none; norms and biases stay"
    )
    rotations: tuple[Rotation, ...] = Field(
        default=(), description="r1: of the residual stream; r2: of each head's values; the model computes the same"
    )
    kv_cache: KvScheme | None = Field(
        default=None, description="keys and values: fp8 or int8 with scales from calibration; default: floats"
    )
    calibration: CalibrationSettings | None = Field(
        default=None, description="of calibrated methods: text, samples and limits"
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_takes_the_linears(cls, data: Any) -> Any:
        """Until the choice is made, the first candidate stands for all linears."""
        if not isinstance(data, dict) or not isinstance(data.get("auto"), dict):
            return data
        if "linears" in data:
            raise ValueError("auto chooses the linears; leave linears out, and settle some of them by overrides")
        candidates = data["auto"].get("candidates")
        return {**data, "linears": candidates[0]} if isinstance(candidates, list | tuple) and candidates else data

    @model_validator(mode="after")
    def _rotations_differ(self) -> Recipe:
        if len(set(self.rotations)) < len(self.rotations):
            raise ValueError(f"rotations are {', '.join(self.rotations)}; name each of r1 and r2 once at most")
        return self

    @model_validator(mode="after")
    def _calibration_is_used(self) -> Recipe:
        for key, rule in (("embeddings", self.embeddings), ("lm_head", self.lm_head)):
            if rule is not None and rule.int4 is not None and rule.int4.is_calibrated:
                raise ValueError(f"{key}: method {rule.method} is for the linears of decoder layers; use rtn here")
            if rule is not None and rule.activations is not None:
                raise ValueError(f"{key}: activations are for the linears of decoder layers; leave them out here")
        if self.calibration is not None and not self.needs_text:
            raise ValueError(
                "calibration has no effect without a method (importance, awq or gptq), static activations, smoothing, "
                "kv_cache or auto"
            )
        return self

    @property
    def is_calibrated(self) -> bool:
        """Whether something depends on the inputs of linears, or on keys and values."""
        rules = (self.linears, *self.overrides, *(self.auto.candidates if self.auto is not None else ()))
        return self.kv_cache is not None or any(rule.is_calibrated for rule in rules)

    @property
    def needs_text(self) -> bool:
        """Whether a text runs through the model, for values or for sensitivity."""
        return self.is_calibrated or (self.auto is not None and self.auto.sensitivity != "weights")

    def record(self) -> dict[str, Any]:
        """What a checkpoint's config.json says of the recipe: what it set, but for the calibration, which may have been
        another one and is recorded by itself.
        """
        stood_in = {"linears"} if self.auto is not None else set()  # for the choice
        return self.model_dump(mode="json", exclude_none=True, exclude={"calibration", *stood_in})
