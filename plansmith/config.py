"""The build file: one YAML file that describes a build, and the same file works on a laptop and on a GPU node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from builder.options import BuildOptions
from plansmith_errors import ConfigError
from quantize.calibration.settings import CalibrationSettings
from quantize.recipe_files import relative_to
from quantize.yaml_model import parse_yaml, read_yaml, validate
from triton_repo.options import PackageOptions


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuantizeSection(Section):
    recipe: str | dict[str, Any] = Field(
        "int4-rtn",
        description="Name of a recipe that ships with Plansmith, a path to one, or a recipe itself: with extends, "
        "only what differs.",
    )
    calibration: CalibrationSettings | None = Field(
        None, description="In place of the recipe's own; of calibrated recipes alone. Text relative to the build file."
    )


class PerplexityCheck(Section):
    text: Path = Field(description="UTF-8 text to measure on; relative to the build file.")
    window: int = Field(512, strict=True, ge=2, description="Tokens per window.")
    max_windows: int = Field(8, strict=True, ge=1, description="Windows to score.")
    max_increase: float | None = Field(
        None, gt=1, description="Fail when perplexity exceeds this multiple of the unquantized model's."
    )


class KlCheck(Section):
    max_mean: float = Field(
        gt=0, description="Fail when the mean KL divergence to the unquantized model exceeds this, in nats per token."
    )


class Top1Check(Section):
    min_agreement: float = Field(
        ge=0,
        le=1,
        description="Fail when the likeliest token is the unquantized model's at a smaller share of positions.",
    )


class ChoicesCheck(Section):
    questions: Path = Field(
        description="JSON lines of {goal, sol1, sol2}, as PIQA has them; relative to the build file."
    )
    labels: Path = Field(
        description="One line per question: 0 when sol1 is right, 1 when sol2 is; relative to the file."
    )
    min_acc: float | None = Field(None, ge=0, le=1, description="Fail when a smaller share of answers is right.")


class VerifySection(Section):
    perplexity: PerplexityCheck | None = Field(
        None, description="Perplexity of the compiled engine beside that of the unquantized model on the same target."
    )
    kl: KlCheck | None = Field(None, description="Limit of the KL divergence, measured on perplexity.text.")
    top1: Top1Check | None = Field(None, description="Limit of the top-1 agreement, measured on perplexity.text.")
    choices: ChoicesCheck | None = Field(None, description="Multiple-choice questions, answered by log likelihood.")

    @model_validator(mode="after")
    def _limits_have_a_text(self) -> VerifySection:
        if self.perplexity is None and (self.kl or self.top1):
            raise ValueError("kl and top1 are measured on the text of verify.perplexity; name it there")
        return self


class ServeSection(Section):
    host: str = Field("127.0.0.1", description="Address to listen on.")
    http_port: int = Field(8000, strict=True, ge=0, le=65535, description="0: any free port.")
    grpc_port: int = Field(8001, strict=True, ge=0, le=65535, description="0: any free port.")
    metrics_port: int = Field(8002, strict=True, ge=0, le=65535, description="0: any free port.")


class BuildFile(Section):
    """A whole build: where the model comes from and what each stage does with it."""

    model: Path = Field(description="Source checkpoint: a safetensors directory or a GGUF file; relative to the file.")
    store: Path = Field(Path(".plansmith"), description="Where stages keep their outputs; relative to the file.")
    quantize: QuantizeSection = QuantizeSection()
    build: BuildOptions = BuildOptions()
    package: PackageOptions = PackageOptions()
    verify: VerifySection = VerifySection()
    serve: ServeSection = ServeSection()


def load_build_file(path: Path | None, settings: Sequence[str] = (), **defaults: str) -> BuildFile:
    """Read a build file and apply ``--set`` overrides; without a file, start from ``defaults``.

    Relative paths of the file are taken from its folder. Raises ConfigError.
    """
    data: Any = read_yaml(path) if path is not None else dict(defaults)
    source = str(path) if path is not None else "settings"
    if not isinstance(data, dict):
        validate(BuildFile, data, source)
    for setting in settings:
        apply_setting(data, setting)
    build_file = validate(BuildFile, data, source)
    return _resolve_paths(build_file, path.parent if path is not None else Path())


def apply_setting(data: dict[str, Any], setting: str) -> None:
    """Apply one ``a.b=c`` override in place; the value is read as YAML. Raises ConfigError."""
    key, equals, value = setting.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents):
        raise ConfigError(f"--set {setting!r}: expected KEY=VALUE, such as build.max_seq_len=2048")
    for parent in parents:
        nested = data.setdefault(parent, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"--set {setting!r}: {parent!r} is {nested!r}, not a section")
        data = nested
    if not value.strip():
        raise ConfigError(f"--set {setting!r}: no value; expected KEY=VALUE, with null for none")
    data[last] = parse_yaml(value, f"--set {setting!r}")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of build files; committed as plansmith/build.schema.json for editors and CI."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **BuildFile.model_json_schema()}


def _resolve_paths(build_file: BuildFile, folder: Path) -> BuildFile:
    changes: dict[str, Any] = {"model": folder / build_file.model, "store": folder / build_file.store}
    changes["verify"] = _resolve_verify(build_file.verify, folder)
    changes["quantize"] = _resolve_quantize(build_file.quantize, folder)
    return build_file.model_copy(update=changes)


def _resolve_verify(section: VerifySection, folder: Path) -> VerifySection:
    changes: dict[str, Any] = {}
    if section.perplexity is not None:
        changes["perplexity"] = section.perplexity.model_copy(update={"text": folder / section.perplexity.text})
    if section.choices is not None:
        files = {"questions": folder / section.choices.questions, "labels": folder / section.choices.labels}
        changes["choices"] = section.choices.model_copy(update=files)
    return section.model_copy(update=changes)


def _resolve_quantize(section: QuantizeSection, folder: Path) -> QuantizeSection:
    changes: dict[str, Any] = {}
    changes["recipe"] = relative_to(section.recipe, folder)
    if section.calibration is not None and section.calibration.text is not None:
        text = folder / section.calibration.text
        changes["calibration"] = section.calibration.model_copy(update={"text": text})
    return section.model_copy(update=changes)
