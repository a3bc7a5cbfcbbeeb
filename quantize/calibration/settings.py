"""What a recipe says about calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from quantize.weight_rule import Method

Precision = Literal["auto", "float32", "bfloat16"]


class CalibrationSettings(BaseModel):
    """The tokens that calibrated methods look at, and how much they may cost."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Path | None = Field(
        default=None,
        description='UTF-8 text, or .jsonl with {"text": ...} or chat turns {"messages": [...]}, relative to the file '
        "that names it; default: 38 kB that ship with Plansmith, of several kinds",
    )
    num_samples: int = Field(default=16, strict=True, ge=1, description="windows of tokens")
    sequence_length: int = Field(default=512, strict=True, ge=2, description="tokens per window")
    min_expert_tokens: int = Field(
        default=64,
        strict=True,
        ge=1,
        description="models with experts: one that sees fewer is rounded without calibration, and named",
    )
    precision: Precision = Field(
        default="auto",
        description="of the factors of matrix products when the model is run: float32, bfloat16, or (auto) bfloat16 "
        "where the processor multiplies it and nothing but int4 is calibrated",
    )
    compensates_drift: bool | None = Field(
        default=None,
        strict=True,
        description="make good what rounding the linears before did to the inputs, towards the outputs of the "
        "unquantized model, which runs beside; false: each linear for itself; default: gptq does, awq does not",
    )
    seed: int = Field(default=0, strict=True, ge=0, description="chooses the windows of a longer text")
    max_seconds: float | None = Field(
        default=None, gt=0, description="refuse to start when the estimate is above this; default: no limit"
    )
    max_activation_gb: float = Field(
        default=0.25,
        ge=0,
        description="activations between and within layers above this go to a file beside the output",
    )

    @property
    def compensating(self) -> frozenset[Method]:
        """Methods that do. AWQ gains nothing by it: its scales fit the inputs that it sees."""
        return frozenset({None: ("gptq",), True: ("awq", "gptq"), False: ()}[self.compensates_drift])
