"""All ranks of an engine for GPUs: built in processes of their own, and put together for the manifest."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builder.build_check import check_build, resolve_sms, stored_types
from builder.build_job import BuildJob
from builder.gpu_manifest import GpuEngine, RankRecord
from builder.manifest import KvCache
from builder.parallel import Rank
from builder.sharding import records
from builder.sharding.legality import check_parallelism
from builder.sharding.memory import build_memory
from builder.sharding.tasks import RankResult, RankTask
from builder.sharding.workers import build_ranks, make_executor
from builder.targets.built import BuiltModel
from builder.targets.tensorrt.reuse import kv_cache_type, read_plans, take_plans
from quantize import checkpoint_weights

_log = logging.getLogger(__name__)
_BUILD = "builder.targets.tensorrt.rank_worker:build"
_WRITE_WEIGHTS = "builder.targets.tensorrt.rank_worker:write_weights"


def build(job: BuildJob) -> BuiltModel:
    """Write the plans of every rank to ``job.output``. Raises BuildError that names the ranks that failed.

    The ranks that were built stay there with ``job.resume_state``, and the next call builds only the others.
    """
    options = job.options
    check_build(options, job.spec, stored_types(checkpoint_weights(job.checkpoint)))
    check_parallelism(job.spec, options.parallelism, job.weights)
    sms = resolve_sms(options)
    _warn_of_kv_scales(job)
    ranks, sha256 = _built(job, sms) if job.plans is None else _reused(job, sms, job.plans)
    gpu = GpuEngine(
        sms=sms,
        dtype=options.resolved_dtype,
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        ep_size=options.ep_size,
        weights=options.resolved_weights,
        ranks=tuple(ranks),
    )
    kv_cache = KvCache(
        dtype=kv_cache_type(job),
        tokens_per_block=options.resolved_tokens_per_block,
        bytes_per_block=max(record.kv_bytes_per_block for record in ranks),
    )
    return BuiltModel(kv_cache, _stored(job), gpu=gpu, sha256=sha256)


def _built(job: BuildJob, sms: Sequence[int]) -> tuple[list[RankRecord], dict[str, str]]:
    """Plans of every rank, and the weights beside them where they are external; and the files' SHA-256."""
    results = _run(job, [_task(job, rank, sms) for rank in job.options.parallelism.ranks()])
    ranks = [
        RankRecord.model_validate({**each.report["record"], "peak_rss_bytes": each.peak_rss_bytes}) for each in results
    ]
    _remove_others(job.output, {name for record in ranks for name in record.file_names})
    return ranks, _hashes(results)


def _hashes(results: Sequence[RankResult]) -> dict[str, str]:
    """By file name."""
    return {name: sha256 for each in results for name, sha256 in each.report["sha256"].items()}


def _reused(job: BuildJob, sms: Sequence[int], plans: Path) -> tuple[list[RankRecord], dict[str, str]]:
    """The plans of another engine, and this model's weights; what compiling took is that of the plans' own build."""
    theirs = read_plans(plans, job, sms)
    tasks = [_task(job, Rank(theirs.parallelism, each.rank), sms, each.weight_files[0]) for each in theirs.ranks]
    results = _run(job, tasks)
    _remove_others(job.output, {name for record in theirs.ranks for name in record.weight_files})
    ranks = []
    for record, result in zip(theirs.ranks, results, strict=True):
        take_plans(plans, record, job.output)
        costs = {"other_seconds": result.seconds, "peak_rss_bytes": result.peak_rss_bytes}
        ranks.append(record.model_copy(update=costs))
    return ranks, _hashes(results)


def _run(job: BuildJob, tasks: Sequence[RankTask]) -> list[RankResult]:
    executor = make_executor(job.options.executor or "local", job.options.max_build_workers)
    with _kept_when_stopped(job.output, job.resume_state):
        progress = _Progress(job, len(tasks))
        return build_ranks(tasks, job.output, executor, progress, lambda: {"source": job.source_hashes()})


def _task(job: BuildJob, rank: Rank, sms: Sequence[int], weight_file: str | None = None) -> RankTask:
    """Its arguments name what the rank's files depend on besides the source; ``weight_file``: only that is written."""
    arguments: dict[str, Any] = {
        "checkpoint": str(job.checkpoint.path.resolve()),
        "versions": job.versions,
        "options": job.options.what_is_built(),
        "max_seq_len": job.max_seq_len,
        "sms": list(sms),
        "rank": rank.rank,
        "weight_file": weight_file,
    }
    embedded = job.options.resolved_weights == "embedded"
    return RankTask(
        rank=rank.rank,
        function=_BUILD if weight_file is None else _WRITE_WEIGHTS,
        arguments=arguments,
        memory_bytes=build_memory(job.weights, job.spec, rank, embedded=embedded),
    )


class _Progress:
    """Progress of all ranks as that of one build."""

    def __init__(self, job: BuildJob, num_ranks: int) -> None:
        self._report = job.progress
        self._num_ranks = num_ranks
        self._done: dict[int, int] = {}

    def __call__(self, rank: int, done: int, total: int, name: str) -> None:
        self._done[rank] = done
        label = name if self._num_ranks == 1 else f"rank {rank}: {name}"
        self._report(sum(self._done.values()), total * self._num_ranks, label)


@contextmanager
def _kept_when_stopped(output: Path, resume_state: Path | None) -> Iterator[None]:
    """While ``resume_state`` is there, nobody removes ``output``; it goes when no rank was finished."""
    if resume_state is None:
        yield
        return
    resume_state.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if not records.any_kept(output):
            shutil.rmtree(resume_state, ignore_errors=True)
        raise


def _remove_others(output: Path, names: Set[str]) -> None:
    """What a stopped run left in the same place: records of ranks, and files of other settings."""
    records.forget_all(output)
    for path in output.iterdir():
        if path.name not in names:
            path.unlink()


def _warn_of_kv_scales(job: BuildJob) -> None:
    """What the checkpoint was calibrated for and these plans do not use."""
    found = job.weights.kv_scales(0)
    if found is not None and found[0] != kv_cache_type(job):
        _log.warning(
            "the KV cache is %s; the checkpoint's %s scales are not used (build.kv_cache_dtype takes auto or int8)",
            kv_cache_type(job),
            found[0],
        )


def _stored(job: BuildJob) -> dict[str, str]:
    """How each scheme of the checkpoint is stored: as it is, and floats in the network's type."""
    schemes = {weight.scheme for weight in checkpoint_weights(job.checkpoint)} or {"none"}
    return {scheme: job.options.resolved_dtype if scheme == "none" else scheme for scheme in sorted(schemes)}
