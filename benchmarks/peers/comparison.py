"""What is compared: the models, the jobs of each tool, and Plansmith's recipes for them.

Everywhere only the linears of the decoder layers are quantized; embeddings and head are kept. INT4 is symmetric, in
groups of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Windows:
    """What a model is calibrated on."""

    count: int
    length: int  # tokens


MODELS = {"mid": Windows(4, 256), "smollm2": Windows(16, 512)}


@dataclass(frozen=True)
class Row:
    tool: str
    job: str
    scheme: str  # rows of one scheme are compared with each other
    says: str
    calibrated: bool = False

    @property
    def key(self) -> str:
        return f"{self.tool}-{self.job}"


COPY = "plain-copy"
ROWS = (
    Row("plansmith", "fp8", "fp8", "FP8 per channel"),
    Row("plansmith", "int4", "int4", "INT4 RTN"),
    Row("plansmith", "nvfp4", "nvfp4", "NVFP4 RTN"),
    Row("llmcompressor", "fp8", "fp8", "FP8_DYNAMIC"),
    Row("llmcompressor", "free-fp8", "fp8", "model_free_ptq FP8_DYNAMIC"),
    Row("modelopt", "fp8", "fp8", "FP8, 4 x 256 tokens"),
    Row("llmcompressor", "int4", "int4", "W4A16"),
    Row("llmcompressor", "free-int4", "int4", "model_free_ptq W4A16"),
    Row("modelopt", "int4", "int4", "INT4 blockwise"),
    Row("llmcompressor", "free-nvfp4", "nvfp4", "model_free_ptq NVFP4A16"),
    Row("plansmith", "awq", "awq", "INT4 AWQ", calibrated=True),
    Row("plansmith", "gptq", "gptq", "INT4 GPTQ", calibrated=True),
    Row("plansmith", "gptq-alone", "gptq", "INT4 GPTQ, each linear for itself", calibrated=True),
    Row("llmcompressor", "gptq", "gptq", "INT4 GPTQ", calibrated=True),
    Row("modelopt", "awq", "awq", "INT4 AWQ", calibrated=True),
)
PLANSMITH, PEERS = "plansmith", ("llmcompressor", "modelopt")

_INT4 = {"scheme": "int4", "group_size": 64, "symmetric": True}
_LINEARS: dict[str, dict[str, Any]] = {
    "fp8": {"scheme": "fp8", "granularity": "channel"},
    "int4": {**_INT4, "scale": "absmax"},
    "nvfp4": {"scheme": "nvfp4", "scale": "absmax"},
    "awq": {**_INT4, "method": "awq"},
    "gptq": {**_INT4, "method": "gptq"},
    "gptq-alone": {**_INT4, "method": "gptq"},
}


def recipe_of(job: str, windows: Windows, text: Path) -> dict[str, Any]:
    """Plansmith's recipe for ``job``, as YAML would give it."""
    recipe: dict[str, Any] = {"name": job, "linears": _LINEARS[job], "embeddings": {"scheme": "none"}}
    if "method" in _LINEARS[job]:
        recipe["calibration"] = {
            "text": str(text.resolve()),
            "num_samples": windows.count,
            "sequence_length": windows.length,
        }
        if job.endswith("-alone"):
            recipe["calibration"]["compensates_drift"] = False
    return recipe
