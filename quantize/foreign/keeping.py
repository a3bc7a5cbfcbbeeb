"""Matrices that are stored as the recipe asks already: values and scales are copied, not rounded a second time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from quantize.checkpoint import Checkpoint
from quantize.foreign.packed_weight import Form, PackedWeight
from quantize.foreign.split import PackedCheckpoint
from quantize.magnitudes import measure, rows_per_chunk
from quantize.plan import PlannedTensor
from quantize.report import TensorReport
from quantize.safetensors_writer import SafetensorsWriter, TensorSpec
from quantize.weight_rule import BLOCK_SIZES

log = logging.getLogger(__name__)


def keep_stored(checkpoint: Checkpoint, planned: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """The plan, with ``kept`` set where the source holds the very scheme; of int4 no method is left then.

    What has the scheme but cannot be kept is rounded again, and a warning says why.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        return list(planned)
    candidates = {tensor.info.name: weight for tensor in planned if (weight := _candidate(checkpoint, tensor))}
    obstacles = {name: reason for name, weight in candidates.items() if (reason := weight.obstacle())}
    usable = {name: weight for name, weight in candidates.items() if name not in obstacles}
    for tensor in planned:
        name = tensor.info.name
        if name in usable and _shares_scale(tensor) and not _agree(usable, tensor.scaled_with):
            obstacles[name] = "matrices that run-times fuse have no common scale of the tensor"
    kept = {name: weight for name, weight in usable.items() if name not in obstacles}
    _log(checkpoint, list(kept.values()), obstacles)
    return [_kept(tensor, kept[tensor.info.name]) if tensor.info.name in kept else tensor for tensor in planned]


def write_kept(planned: PlannedTensor, weight: PackedWeight, writer: SafetensorsWriter, pool: Executor) -> TensorReport:
    """Copy the values and scales. Raises QuantizeError for NaN and infinity."""
    specs, info = planned.specs, planned.info
    slot = writer.add(specs[0])
    step = rows_per_chunk(info.shape[1])

    def copy(begin: int) -> float:
        end = min(begin + step, info.shape[0])
        _, squared_norm = measure(info.name, weight.rows(begin, end), begin)
        slot.write_rows(begin, weight.values(begin, end))
        return squared_norm

    norms = list(pool.map(copy, range(0, info.shape[0], step)))
    scales = weight.scales()
    for spec, array in zip(specs[1:], scales, strict=True):
        writer.add(TensorSpec(spec.name, array.dtype, array.shape)).write_rows(0, array)
    int4 = planned.int4
    return TensorReport(
        name=info.name,
        scheme=planned.scheme,
        shape=info.shape,
        group_size=int4.group_size if int4 else BLOCK_SIZES.get(planned.scheme),
        symmetric=int4 is None or int4.symmetric,
        bytes_in=info.nbytes,
        bytes_out=specs[0].nbytes + sum(array.nbytes for array in scales),
        squared_norm=sum(norms),
        squared_error=0.0,
        granularity=planned.floats.granularity if planned.floats and planned.scheme == "fp8" else None,
        is_kept=True,
    )


def _candidate(checkpoint: PackedCheckpoint, tensor: PlannedTensor) -> PackedWeight | None:
    weight = checkpoint.packed(tensor.info.name)
    if weight is None or tensor.scheme == "none" or tensor.is_smoothed:  # smoothing makes other weights
        return None
    return weight if weight.form == Form.asked(tensor.scheme, tensor.int4, tensor.floats) else None


def _shares_scale(tensor: PlannedTensor) -> bool:
    return tensor.scheme == "nvfp4" or (tensor.floats is not None and tensor.floats.share_scale)


def _agree(usable: dict[str, PackedWeight], names: Iterable[str]) -> bool:
    """Whether all of them can be kept, with one scale of the tensor."""
    members = [usable.get(name) for name in names]
    scales = {float(member.scales()[-1]) for member in members if member is not None}
    return None not in members and len(scales) == 1


def _kept(tensor: PlannedTensor, weight: PackedWeight) -> PlannedTensor:
    int4 = None if tensor.int4 is None else replace(tensor.int4, method="rtn")
    return replace(tensor, int4=int4, kept=weight)


def _log(checkpoint: Checkpoint, kept: list[PackedWeight], obstacles: dict[str, str]) -> None:
    for form, count in Counter(str(weight.form) for weight in kept).items():
        log.info("%s: %d matrices are %s already, and are kept as they are stored", checkpoint.path, count, form)
    for reason, count in Counter(obstacles.values()).items():
        name = next(name for name, other in obstacles.items() if other == reason)
        log.warning(
            "%s: %d matrices have the scheme that is asked for but are rounded again: %s (%s and others)",
            checkpoint.path,
            count,
            reason,
            name,
        )
