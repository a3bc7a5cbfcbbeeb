"""Compile a checkpoint for the CPU: OpenVINO's IR with quantized weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

from builder.build_job import BuildJob, Progress
from builder.manifest import KvCache
from builder.network import decoder
from builder.network.weights import WeightSource
from builder.targets.built import BuiltModel
from builder.targets.cpu.attention import TOKENS_PER_BLOCK
from builder.targets.cpu.compiled import MODEL_XML, bytes_per_block, compile_engine
from builder.targets.cpu.constants import stored_as
from builder.targets.cpu.ops import OpenVinoOps
from builder.targets.cpu.settings import compile_properties
from plansmith_errors import BuildError, EngineError

log = logging.getLogger(__name__)


def build(job: BuildJob) -> BuiltModel:
    """Write ``model.xml`` and ``model.bin`` to the job's output, then compile them once to prove that they compile."""
    import openvino

    spec, weights, output = job.spec, job.weights, job.output
    exact = job.options.precision == "exact"
    on_weight = _counter(weights, job.progress)
    ops = OpenVinoOps(spec, weights, max_seq_len=job.max_seq_len, keep_float32=exact, on_weight=on_weight)
    logits = decoder(ops, spec)
    _warn_of_floats(ops, weights)
    logits.output(0).get_tensor().set_names({"logits"})
    model = openvino.Model([logits.output(0)], ops.parameters.all(), spec.model_type)
    try:
        openvino.save_model(model, output / MODEL_XML, compress_to_fp16=False)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise BuildError(f"{output}: the engine cannot be written ({reason}); is there room on the disk?") from error
    del model, logits, ops  # free the weights before they are loaded again
    groups = {group for scheme, group in weights.kinds if scheme == "int4" and group}
    properties = compile_properties(job.options.precision, groups)
    try:
        compiled = compile_engine(output, spec, properties)
    except EngineError as error:
        raise BuildError(str(error)) from error
    kv_cache = KvCache(
        dtype=properties["KV_CACHE_PRECISION"],
        tokens_per_block=TOKENS_PER_BLOCK,
        bytes_per_block=bytes_per_block(compiled),
    )
    stored = {scheme: stored_as(scheme, exact) for scheme, _ in sorted(weights.kinds, key=str)}
    return BuiltModel(kv_cache, stored, properties)


def _warn_of_floats(ops: OpenVinoOps, weights: WeightSource) -> None:
    """What the checkpoint was calibrated for and this target computes in floats."""
    if ops.activations:
        log.warning(
            "the cpu target computes with float activations; %s of the checkpoint are not used",
            ", ".join(sorted(ops.activations)),
        )
    kv_scales = weights.kv_scales(0)
    if kv_scales is not None:
        log.warning("the cpu target's KV cache is its own; the checkpoint's %s scales are not used", kv_scales[0])


def _counter(weights: WeightSource, progress: Progress) -> Callable[[str], None]:
    total = sum(len(shape) == 2 for shape in weights.shapes.values())
    names: list[str] = []

    def on_weight(name: str) -> None:
        names.append(name)
        progress(len(names), total, name)

    return on_weight
