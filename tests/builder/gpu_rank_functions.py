"""Stand-ins for the functions that build one rank: files of a few bytes, in real worker processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from gpu_engines import rank_record
from safetensors.numpy import save_file

FAILING_RANKS = "TEST_FAILING_RANKS"
BUILT_LOG = "TEST_BUILT_LOG"  # a line for every rank that was built


def build(arguments: dict[str, Any], output: Path, on_weight: Any) -> dict[str, Any]:
    rank, options = arguments["rank"], arguments["options"]
    on_weight(1, 2, "model.embed_tokens.weight")
    if str(rank) in os.environ.get(FAILING_RANKS, "").split(","):
        from plansmith_errors import BuildError

        raise BuildError("TensorRT has no kernel for it")
    is_external = options["weights"] == "external"
    if is_external:
        write_weights({**arguments, "weight_file": f"rank{rank}.safetensors"}, output, on_weight)
    _log(f"plan {rank}")
    record = rank_record(output, rank, num_layers=2 // options["pp_size"])
    record = record.model_copy(update={"weight_files": (f"rank{rank}.safetensors",) if is_external else ()})
    return {"record": record.model_dump(mode="json"), "sha256": {}}


def write_weights(arguments: dict[str, Any], output: Path, on_weight: Any) -> dict[str, Any]:
    on_weight(2, 2, "writing")
    _log(f"weights {arguments['rank']}")
    save_file({"model.norm.weight": np.ones(1, np.float16)}, output / arguments["weight_file"])
    return {"sha256": {}}


def _log(line: str) -> None:
    with Path(os.environ[BUILT_LOG]).open("a") as file:
        file.write(f"{line}\n")
