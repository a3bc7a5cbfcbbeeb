"""Recipes: which scheme each weight matrix gets, and what happens to the inputs of the linears."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantize.activations import Activations, ActivationScale, ActivationScheme, KvScheme
from quantize.calibration.settings import CalibrationSettings
from quantize.sensitivity.settings import Budget, Sensitivity

SchemeName = Literal["int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "none"]
ScaleName = Literal["absmax", "mse", "four-over-six", "ceil", "ocp", "best-of-two"]
Method = Literal["rtn", "importance", "awq", "gptq"]
Granularity = Literal["tensor", "channel", "block"]
Rotation = Literal["r1", "r2"]
KeepDtype = Literal["source", "float32", "float16", "bfloat16"]
GROUP_SIZES = (32, 64, 128, 192)
_CHANNEL = 0  # in place of a group size: all columns of the matrix, known when there is one
BLOCK_SIZES: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # input columns that share a scale
FP8_BLOCK = 128  # rows and columns
SCALES: dict[str, tuple[ScaleName, ...]] = {  # of a scheme, its default first
    "int4": ("absmax", "mse"),
    "nvfp4": ("absmax", "four-over-six", "mse"),
    "mxfp4": ("ceil", "ocp", "best-of-two"),
}
_OWNERS = {"group_size": ("int4",), "symmetric": ("int4",), "scale": tuple(SCALES)}
_OWNERS |= {"granularity": ("fp8",), "share_scale": ("fp8",)}
_ACTIVATIONS: dict[str, tuple[str, ...]] = {"fp8": ("fp8",), "int4": ("fp8",), "int8": ("int8",), "nvfp4": ("nvfp4",)}
# More than the 0.01 of GPTQ's paper, which has 262144 tokens: a few thousand say less of the inputs to come.
_DAMPING = 0.05


@dataclass(frozen=True)
class Int4Settings:
    group_size: int
    symmetric: bool
    scale: ScaleName
    method: Method = "rtn"
    act_order: bool = False
    damping: float = _DAMPING

    @property
    def is_calibrated(self) -> bool:
        return self.method != "rtn"

    def for_columns(self, columns: int) -> Int4Settings:
        """These settings for a matrix [out, columns], each of whose rows may be one group."""
        return replace(self, group_size=columns) if self.group_size == _CHANNEL else self


@dataclass(frozen=True)
class FloatSettings:
    """Of fp8, nvfp4, mxfp4 and mxfp8."""

    granularity: Granularity  # what shares a scale
    scale: ScaleName | None  # how it is chosen, where there is a choice
    share_scale: bool = False  # of the matrix: with those that run-times fuse with it


@dataclass(frozen=True)
class InputSettings:
    """What happens to the inputs of a linear."""

    activations: Activations
    smoothing: float | None  # SmoothQuant's alpha
    fold_smoothing: bool  # into the module that writes the input; else the factors are stored


class WeightRule(BaseModel):
    """How one kind of weight is stored. A key that has no meaning for the scheme is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: SchemeName = Field(
        description="int4 in groups; int8 per output channel; fp8 (e4m3); nvfp4, mxfp4, mxfp8 in blocks; "
        "none: kept as it is"
    )
    group_size: Literal[32, 64, 128, 192, "channel"] | None = Field(
        default=None, description="int4: input columns that share a scale; channel: all of a row; default 128"
    )
    symmetric: bool | None = Field(default=None, description="int4: no zero points; default true")
    scale: ScaleName | None = Field(
        default=None,
        description="int4: absmax (default) or mse, the least squared error (default of calibrated methods); "
        "nvfp4: absmax (default), four-over-six or mse; mxfp4: ceil (default), ocp or best-of-two",
    )
    granularity: Granularity | None = Field(
        default=None, description="fp8: one scale for a tensor, an output channel (default), or a block of 128 x 128"
    )
    share_scale: bool | None = Field(
        default=None,
        description="fp8 with granularity tensor: q, k and v have one scale, and gate and up; default: nobody shares",
    )
    method: Method | None = Field(
        default=None,
        description="int4: rtn, or by the inputs seen in calibration: importance, awq, gptq; default rtn",
    )
    act_order: bool | None = Field(
        default=None, description="gptq: columns of large inputs first, scales fixed before; default true"
    )
    damping: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="gptq: share of the mean that is added to the diagonal; default 0.05"
    )
    activations: ActivationScheme | None = Field(
        default=None, description="inputs of the linear: fp8 (of fp8 and int4 weights), int8, nvfp4; default: floats"
    )
    activation_scale: ActivationScale | None = Field(
        default=None, description="of activations: static, from calibration (default), or token, found as it runs"
    )
    smoothing: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="SmoothQuant's alpha: how much of the inputs' outliers moves into the weights; of fp8 and int8",
    )
    fold_smoothing: bool | None = Field(
        default=None, description="smoothing: factors go into the module before (default), or are stored beside (false)"
    )

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> WeightRule:
        for key, schemes in _OWNERS.items():
            if self.scheme not in schemes and getattr(self, key) is not None:
                owners = " or ".join(schemes)
                raise ValueError(f"{key} belongs to the scheme {owners} and has no meaning for {self.scheme}")
        if self.scale is not None and self.scale not in SCALES[self.scheme]:
            raise ValueError(f"scale {self.scale} is none of {self.scheme}'s: {', '.join(SCALES[self.scheme])}")
        if self.share_scale is not None and self.granularity != "tensor":
            raise ValueError("share_scale is for granularity tensor, whose matrices have one scale each")
        return self

    @model_validator(mode="after")
    def _activations_fit(self) -> WeightRule:
        if self.activations is None:
            given = [
                key for key in ("activation_scale", "smoothing", "fold_smoothing") if getattr(self, key) is not None
            ]
            if given:
                raise ValueError(f"{given[0]} has no effect without activations")
            return self
        known = _ACTIVATIONS.get(self.scheme, ())
        if self.activations not in known:
            raise ValueError(f"activations of {self.scheme} weights are {' or '.join(known) or 'floats'}")
        if self.granularity == "block":
            raise ValueError("fp8 in blocks has scales of its inputs' blocks, found as it runs; leave activations out")
        if self.activations == "nvfp4" and self.activation_scale == "token":
            raise ValueError("nvfp4 activations have a static scale of the tensor; leave activation_scale out")
        if self.smoothing is not None and self.scheme not in ("fp8", "int8"):
            raise ValueError(f"smoothing is for fp8 and int8 weights, found {self.scheme}; int4 has method awq")
        if self.fold_smoothing is not None and self.smoothing is None:
            raise ValueError("fold_smoothing has no effect without smoothing")
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> WeightRule:
        if self.scheme != "int4" and self.method is not None:
            raise ValueError(f"method belongs to the scheme int4 and has no meaning for {self.scheme}")
        given = [key for key in ("act_order", "damping") if getattr(self, key) is not None]
        if self.method != "gptq" and given:
            raise ValueError(f"{given[0]} belongs to the method gptq and has no meaning for {self.method or 'rtn'}")
        if self.method == "importance" and self.scale == "absmax":
            raise ValueError("scale absmax leaves nothing to weigh; method importance needs scale mse")
        return self

    @property
    def int4(self) -> Int4Settings | None:
        """int4's settings with the defaults filled in; None for the other schemes."""
        if self.scheme != "int4":
            return None
        method = self.method or "rtn"
        return Int4Settings(
            _CHANNEL if self.group_size == "channel" else self.group_size or 128,
            self.symmetric is not False,
            self.scale or ("absmax" if method == "rtn" else "mse"),
            method,
            act_order=method == "gptq" and self.act_order is not False,
            damping=self.damping or _DAMPING,
        )

    @property
    def inputs(self) -> InputSettings | None:
        """What happens to the inputs, with the defaults filled in; None: they stay floats, or the run-time decides."""
        if self.activations is None:
            return None
        activations = Activations(self.activations, self.activation_scale or "static")
        return InputSettings(activations, self.smoothing, self.fold_smoothing is not False)

    @property
    def floats(self) -> FloatSettings | None:
        """The settings of a scheme of floats with the defaults filled in; None for the other schemes."""
        if self.scheme == "fp8":
            return FloatSettings(self.granularity or "channel", None, self.share_scale is True)
        if self.scheme not in BLOCK_SIZES:
            return None
        return FloatSettings("block", self.scale or SCALES.get(self.scheme, (None,))[0])

    @property
    def is_calibrated(self) -> bool:
        """Whether it depends on the inputs that calibration sees."""
        if self.int4 is not None and self.int4.is_calibrated:
            return True
        inputs = self.inputs
        return inputs is not None and (inputs.activations.scale == "static" or inputs.smoothing is not None)


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
