"""The rule of a weight: its scheme with the settings of that, and what happens to the inputs of the linear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantize.activations import Activations, ActivationScale, ActivationScheme

SchemeName = Literal["int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "none"]
ScaleName = Literal["absmax", "mse", "four-over-six", "ceil", "ocp", "best-of-two"]
Method = Literal["rtn", "importance", "awq", "gptq"]
Granularity = Literal["tensor", "channel", "block"]
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
