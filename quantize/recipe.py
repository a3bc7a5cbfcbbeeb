"""Recipes: which scheme each weight matrix gets. The built-in ones are the YAML files of ``recipes/``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plansmith_errors import ConfigError
from quantize.yaml_model import read_yaml, validate

SchemeName = Literal["int4", "int8", "fp8", "nvfp4", "mxfp4", "mxfp8", "none"]
ScaleName = Literal["absmax", "mse", "four-over-six", "ceil", "ocp", "best-of-two"]
Granularity = Literal["tensor", "channel", "block"]
KeepDtype = Literal["source", "float32", "float16", "bfloat16"]
GROUP_SIZES = (32, 64, 128, 192)
BLOCK_SIZES: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # input columns that share a scale
FP8_BLOCK = 128  # rows and columns
SCALES: dict[str, tuple[ScaleName, ...]] = {  # of a scheme, its default first
    "int4": ("absmax", "mse"),
    "nvfp4": ("absmax", "four-over-six", "mse"),
    "mxfp4": ("ceil", "ocp", "best-of-two"),
}
_OWNERS = {"group_size": ("int4",), "symmetric": ("int4",), "scale": tuple(SCALES), "granularity": ("fp8",)}
_DIRECTORY = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Int4Settings:
    group_size: int
    symmetric: bool
    scale: ScaleName


@dataclass(frozen=True)
class FloatSettings:
    """Of fp8, nvfp4, mxfp4 and mxfp8."""

    granularity: Granularity  # what shares a scale
    scale: ScaleName | None  # how it is chosen, where there is a choice


class WeightRule(BaseModel):
    """How one kind of weight is stored. A key that has no meaning for the scheme is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: SchemeName = Field(
        description="int4 in groups; int8 per output channel; fp8 (e4m3); nvfp4, mxfp4, mxfp8 in blocks; "
        "none: kept as it is"
    )
    group_size: Literal[32, 64, 128, 192] | None = Field(
        default=None, description="int4: input columns that share a scale; default 128"
    )
    symmetric: bool | None = Field(default=None, description="int4: no zero points; default true")
    scale: ScaleName | None = Field(
        default=None,
        description="int4: absmax (default) or mse, the least squared error; nvfp4: absmax (default), four-over-six "
        "or mse; mxfp4: ceil (default), ocp or best-of-two",
    )
    granularity: Granularity | None = Field(
        default=None, description="fp8: one scale for a tensor, an output channel (default), or a block of 128 x 128"
    )

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> WeightRule:
        for key, schemes in _OWNERS.items():
            if self.scheme not in schemes and getattr(self, key) is not None:
                owners = " or ".join(schemes)
                raise ValueError(f"{key} belongs to the scheme {owners} and has no meaning for {self.scheme}")
        if self.scale is not None and self.scale not in SCALES[self.scheme]:
            raise ValueError(f"scale {self.scale} is none of {self.scheme}'s: {', '.join(SCALES[self.scheme])}")
        return self

    @property
    def int4(self) -> Int4Settings | None:
        """int4's settings with the defaults filled in; None for the other schemes."""
        if self.scheme != "int4":
            return None
        return Int4Settings(self.group_size or 128, self.symmetric is not False, self.scale or "absmax")

    @property
    def floats(self) -> FloatSettings | None:
        """The settings of a scheme of floats with the defaults filled in; None for the other schemes."""
        if self.scheme == "fp8":
            return FloatSettings(self.granularity or "channel", None)
        if self.scheme not in BLOCK_SIZES:
            return None
        return FloatSettings("block", self.scale or SCALES.get(self.scheme, (None,))[0])


class Override(WeightRule):
    """A rule for the weights whose names match a pattern of fnmatch. The last override that matches wins."""

    match: Annotated[str, Field(min_length=1, description="for example '*.down_proj.weight'")]


class Recipe(BaseModel):
    """A quantization recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    linears: WeightRule
    embeddings: WeightRule = Field(default=WeightRule(scheme="none"), description="of a model with a tied head: both")
    lm_head: WeightRule | None = Field(default=None, description="default: as the embeddings")
    overrides: tuple[Override, ...] = ()
    keep_dtype: KeepDtype = Field(
        default="source", description="type of the matrices whose scheme is none; norms and biases stay"
    )


def list_recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def load_recipe(name_or_path: str) -> Recipe:
    """Read a built-in recipe by name, or a YAML file by path. Raises ConfigError."""
    path = _DIRECTORY / f"{name_or_path}.yaml"
    if name_or_path not in list_recipes():
        path = Path(name_or_path)
        if path.suffix not in (".yaml", ".yml"):
            raise ConfigError(f"recipe {name_or_path!r} is unknown; {_suggest(name_or_path)}, or give a .yaml file")
    return validate(Recipe, read_yaml(path), str(path))


def _suggest(name: str) -> str:
    near = difflib.get_close_matches(name, list_recipes(), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(list_recipes())}"
