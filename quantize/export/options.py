"""What to export, and for whom. Nothing heavy is imported here: the command reads the choices for its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plansmith_errors import ExportError

Format = Literal["trtllm", "compressed-tensors", "modelopt"]
Consumer = Literal["tensorrt-llm-1.2", "tensorrt-llm", "vllm", "sglang", "modelopt"]
DtypeChoice = Literal["auto", "float16", "bfloat16", "float32"]

# The first consumer of a format is the one that is meant when none is named.
CONSUMERS: dict[Format, tuple[Consumer, ...]] = {
    "trtllm": ("tensorrt-llm-1.2",),
    "compressed-tensors": ("vllm", "sglang", "tensorrt-llm"),
    "modelopt": ("tensorrt-llm", "vllm", "modelopt"),
}
LABELS: dict[Consumer, str] = {
    "tensorrt-llm-1.2": "trtllm-build of TensorRT-LLM 1.2",
    "tensorrt-llm": "TensorRT-LLM 1.3 and later",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "modelopt": "tools that read what ModelOpt 0.47 writes",
}


@dataclass(frozen=True)
class ExportOptions:
    """``dtype``: of everything that is not quantized; "auto": the model's own when it has 16 bits, else float16."""

    format: Format
    consumer: Consumer | None = None
    tp_size: int = 1
    pp_size: int = 1
    dtype: DtypeChoice = "auto"

    @property
    def resolved_consumer(self) -> Consumer:
        """Raises ExportError when the consumer does not read the format."""
        known = CONSUMERS[self.format]
        if self.consumer is None:
            return known[0]
        if self.consumer not in known:
            formats = [name for name, consumers in CONSUMERS.items() if self.consumer in consumers]
            raise ExportError(
                f"{LABELS[self.consumer]} does not load the format {self.format!r}; "
                f"formats for it: {', '.join(formats)}; consumers of {self.format!r}: {', '.join(known)}"
            )
        return self.consumer

    def check_parallelism(self) -> None:
        """Raises ExportError for a cut that the format does not have."""
        for name, value in (("tp", self.tp_size), ("pp", self.pp_size)):
            if value < 1:
                raise ExportError(f"{name} is {value}, expected 1 or more")
        if self.format != "trtllm" and (self.tp_size, self.pp_size) != (1, 1):
            raise ExportError(
                f"the format {self.format!r} is cut over ranks by the run-time, at load; leave --tp and --pp out"
            )
