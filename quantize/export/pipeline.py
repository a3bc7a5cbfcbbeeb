"""Export a checkpoint: what can be refused is refused first, then tensors are streamed into the new files."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plansmith_errors import ExportError
from quantize.export import compressed_tensors, modelopt, trtllm_config
from quantize.export.casting import float_dtype
from quantize.export.consumers import check_consumer
from quantize.export.experts import check_experts
from quantize.export.families import check_family
from quantize.export.fused import fused
from quantize.export.model_card import model_card
from quantize.export.options import Consumer, ExportOptions
from quantize.export.source import ExportSource, describe_source, open_source
from quantize.export.trtllm_layout import RankLayout
from quantize.export.trtllm_modules import plan_modules
from quantize.export.trtllm_scales import ModuleScales
from quantize.export.trtllm_weights import rank_plan
from quantize.export.writing import PlannedTensors, write_file, write_model
from quantize.parallel import Mapping, legal_advice, problems_of

MAX_SHARD_BYTES = 4 * 2**30

Progress = Callable[[int, int, str], None]
"""Called after each tensor with how many are done, how many there are, and its name."""


@dataclass(frozen=True)
class ExportReport:
    consumer: Consumer
    scheme: str
    dtype: str  # of what is not quantized
    num_tensors: int
    bytes_out: int  # of all tensors, scales included
    seconds: float


def export_checkpoint(
    source: Path,
    output: Path,
    options: ExportOptions,
    *,
    progress: Progress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write ``source`` into ``output``, a new or empty directory, in the layout that ``options`` ask for.

    The caller owns atomicity; config.json is written last. The same input gives the same bytes. Only one tensor is in
    memory at a time. Raises CheckpointError for the source, ExportError for what the run-time would not load.
    """
    start = time.perf_counter()
    options.check_parallelism()
    consumer = options.resolved_consumer
    checkpoint = open_source(source)
    described = describe_source(checkpoint, float_dtype(checkpoint, options))
    check_consumer(options.format, consumer, described)
    check_experts(options.format, consumer, described)
    check_family(consumer, described)
    if options.format == "trtllm":
        files, config = _unified(described, Mapping(options.tp_size, options.pp_size))
    else:
        files, config = _hugging_face(described, options)
    tensors = [tensors for planned in files.values() for tensors in planned]
    counter = _Counter(sum(len(planned.specs) for planned in tensors), progress)
    try:
        _prepare_output(output, sum(planned.nbytes for planned in tensors))
        if options.format == "trtllm":
            for name, planned in files.items():
                write_file(output / name, planned, counter.step)
        else:
            write_model(output, tensors, max_shard_bytes, counter.step)
        _write_small_files(output, described, options, config)
    except OSError as error:
        raise ExportError(f"{error.filename or output}: {error.strerror}; the export is incomplete") from None
    return ExportReport(
        consumer=consumer,
        scheme=str(described.scheme),
        dtype=described.dtype.name,
        num_tensors=counter.total,
        bytes_out=sum(planned.nbytes for planned in tensors),
        seconds=time.perf_counter() - start,
    )


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress

    def step(self, name: str) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self.total, name)


Files = dict[str, list[PlannedTensors]]
Config = dict[str, dict[str, Any]]  # file name -> content


def _unified(source: ExportSource, mapping: Mapping) -> tuple[Files, Config]:
    plan = plan_modules(source, mapping)
    problems = problems_of(source.shape, mapping, plan.int4_group, has_nvfp4=plan.has_nvfp4)
    if problems:
        raise ExportError(f"{problems[0]}; {legal_advice(source.shape, plan.int4_group, has_nvfp4=plan.has_nvfp4)}")
    config = trtllm_config.unified_config(source, mapping, plan)
    layers = trtllm_config.layer_quantization(plan, source.kv_cache)
    layout = RankLayout(source.shape, mapping, source.dtype, plan.scheme_of, source.kv_cache is not None)
    scales = ModuleScales(source)
    scales.warn_of_rounding(layout.modules())
    files = {
        f"rank{rank}.safetensors": list(rank_plan(source, layout, scales, rank)) for rank in range(mapping.world_size)
    }
    return files, {"config.json": config} if layers is None else {"quant_cfg.json": layers, "config.json": config}


def _hugging_face(source: ExportSource, options: ExportOptions) -> tuple[Files, Config]:
    layout = compressed_tensors if options.format == "compressed-tensors" else modelopt
    source = fused(source)
    planned = layout.plan(source)
    config = {key: value for key, value in source.checkpoint.config.items() if key != "quantization_config"}
    for key in ("dtype", "torch_dtype"):
        if key in config or key == "torch_dtype":  # the older key is read by every release
            config[key] = source.dtype.name
    config |= {"tie_word_embeddings": source.shape.is_tied, "quantization_config": layout.config(source)}
    files: Config = {"config.json": config}
    if options.format == "modelopt":
        files = {"hf_quant_config.json": modelopt.quant_config(source), **files}
    return {"model.safetensors": planned}, files


def _prepare_output(output: Path, needed: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise ExportError(f"{output}: is not empty; give a new directory")
    free = shutil.disk_usage(output).free
    if free < needed:
        raise ExportError(f"{output}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


def _write_small_files(output: Path, source: ExportSource, options: ExportOptions, config: Config) -> None:
    for name, data in source.checkpoint.side_files().items():
        (output / name).write_bytes(data)
    (output / "README.md").write_text(model_card(source, options), encoding="utf-8")
    for name, content in config.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
