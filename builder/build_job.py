"""One build, with everything that was looked up before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.options import BuildOptions

if TYPE_CHECKING:
    from quantize import Checkpoint

Progress = Callable[[int, int, str], None]
"""Called with weights done, weights in all and the name of the weight that is being added."""


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    checkpoint: Checkpoint
    source_hashes: Callable[[], dict[str, str]]  # of its files by name; waits until they are known
    spec: ModelSpec
    weights: WeightSource
    output: Path
    options: BuildOptions
    max_seq_len: int
    versions: dict[str, str]  # of the compiling library and of Plansmith
    progress: Progress
    plans: Path | None  # an engine whose plans are to be used, with external weights
    resume_state: Path | None  # a directory that is there while ``output`` is to be kept, finished or not
