"""The models that benchmarks run, made once and reused while they are up to date; all in .cache/benchmarks.

SmolLM2-135M is the demo's GGUF file with the demo's recipe, llama-1B has random weights (``random_llama``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import random_llama

from plansmith.config import BuildFile
from plansmith.console import Console
from plansmith.fingerprint import code_fingerprint, library_versions
from plansmith.options import GlobalOptions
from plansmith.pipeline import Pipeline
from plansmith.store import Artifact, ArtifactStore, open_store
from quantize import open_checkpoint

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache" / "benchmarks"
LOGS = CACHE / "logs"
DEMO, LARGE = "SmolLM2-135M", "llama-1B"
RECIPES = {DEMO: "int4-rtn", LARGE: str(HERE / "int4-g128.yaml")}  # both int4 with zero points, int8 head
MAX_SEQ_LEN, MAX_BATCH_SIZE, MAX_NUM_TOKENS = 2048, 32, 512


@dataclass(frozen=True)
class Model:
    """One model in every form that a contender loads."""

    name: str
    checkpoint: Path  # quantized
    engine: Path
    repository: Path
    gguf: Path  # for llama.cpp


def prepare(gguf: Path, names: Sequence[str] = (DEMO,)) -> list[Model]:
    """Quantize, build and package what is not up to date. ``gguf`` is the demo's model. Raises PlansmithError."""
    with open_store(CACHE) as store:
        return [_demo(gguf, store) if name == DEMO else _large(gguf, store) for name in names]


def prepare_genai(model: Model) -> Path:
    """The directory of ``model`` for OpenVINO GenAI, made from the very same quantized checkpoint."""
    from stateful_ir import write_genai_model

    depends_on = {
        "checkpoint": model.checkpoint.parent.name,
        "code": code_fingerprint("builder", "quantize"),
        "script": (HERE / "stateful_ir.py").read_text(),
        "libraries": library_versions("openvino", "openvino-tokenizers"),
    }

    def write(output: Path) -> None:
        write_genai_model(model.checkpoint, output, MAX_SEQ_LEN)

    with open_store(CACHE) as store:
        return _make(store, "genai", depends_on, write)


def _demo(gguf: Path, store: ArtifactStore) -> Model:
    return _run_pipeline(DEMO, gguf, gguf, store)


def _large(gguf: Path, store: ArtifactStore) -> Model:
    depends_on = {"script": (HERE / "random_llama.py").read_text(), "tokenizer": store.file_hashes.hash(gguf)}
    weights = _make(
        store, "random", depends_on, lambda output: random_llama.write_checkpoint(output, open_checkpoint(gguf))
    )
    name = "llama-1B.Q4_0.gguf"
    q4_0 = _make(store, "gguf", depends_on, lambda output: random_llama.write_q4_0(weights, gguf, output / name))
    return _run_pipeline(LARGE, weights, q4_0 / name, store)


def _make(store: ArtifactStore, stage: str, depends_on: Mapping[str, object], produce: Callable[[Path], None]) -> Path:
    artifact = store.make(stage, dict(depends_on), produce)
    if not artifact.reused:
        print(f"{stage} done in {artifact.seconds:.1f} s", file=sys.stderr)
    return artifact.payload


def _run_pipeline(name: str, source: Path, gguf: Path, store: ArtifactStore) -> Model:
    build_file = BuildFile.model_validate(
        {
            "model": source,
            "quantize": {"recipe": RECIPES[name]},
            "build": {
                "max_batch_size": MAX_BATCH_SIZE,
                "max_num_tokens": MAX_NUM_TOKENS,
                "max_seq_len": MAX_SEQ_LEN,
            },
        }
    )
    result = Pipeline(build_file, store, Console(GlobalOptions())).run()
    stages: dict[str, Artifact] = {stage.stage: stage for stage in result.stages}
    return Model(name, stages["quantize"].payload, stages["build"].payload, result.repository, gguf)
