"""Which ranks of an unfinished engine directory are whole, so that a next run builds only the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

from builder.sharding.tasks import Besides, RankResult, RankTask

_PREFIX = ".built-rank"


def keep(result: RankResult, key: str, built: Path, engine: Path) -> None:
    """Move the rank's files from ``built`` to the directory ``engine``; its record, written last, makes them whole.

    ``key``: of its task.
    """
    names = sorted(file.name for file in built.iterdir())
    for name in names:
        _flush(built / name)
        (built / name).replace(engine / name)
    record = {
        "key": key,
        "files": {name: (engine / name).stat().st_size for name in names},
        "report": result.report,
        "seconds": result.seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
    }
    path = _record(engine, result.rank)
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(record), encoding="utf-8")
    _flush(unfinished)
    unfinished.replace(path)
    built.rmdir()


def find(task: RankTask, engine: Path, besides: Besides) -> RankResult | None:
    """What an earlier run built, where it is of the same task and every file is there at its size."""
    try:
        record = json.loads(_record(engine, task.rank).read_text(encoding="utf-8"))
        sizes = {name: (engine / name).stat().st_size for name in record["files"]}
        if record["key"] != task.key(besides()) or sizes != record["files"]:
            return None
        return RankResult(
            rank=task.rank,
            report=record["report"],
            seconds=record["seconds"],
            peak_rss_bytes=record["peak_rss_bytes"],
            reused=True,
        )
    except (OSError, ValueError, KeyError, TypeError):  # none, or one that is damaged: the rank is built
        return None


def any_kept(engine: Path) -> bool:
    """Whether the unfinished ``engine`` holds a rank that a next run need not build."""
    return any(engine.glob(f"{_PREFIX}*.json"))


def forget_all(engine: Path) -> None:
    """The engine is whole."""
    for path in engine.glob(f"{_PREFIX}*"):
        path.unlink()


def _record(engine: Path, rank: int) -> Path:
    return engine / f"{_PREFIX}{rank}.json"


def _flush(path: Path) -> None:
    """To the disk, before a name says that it is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
