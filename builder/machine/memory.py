"""RAM that this process may use: the system's, or less where a container limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    available_bytes: int


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, own: Path = _OWN_GROUPS) -> HostMemory | None:
    """None where the system does not tell, as outside Linux."""
    system = _numbers(meminfo, unit=1024)
    if "MemTotal" not in system or "MemAvailable" not in system:
        return None
    bounds = [HostMemory(system["MemTotal"], system["MemAvailable"]), *_limits(cgroup, own)]
    return HostMemory(min(each.total_bytes for each in bounds), min(each.available_bytes for each in bounds))


def _limits(cgroup: Path, own: Path) -> Iterator[HostMemory]:
    """What each group that this process is in, and each above it, allows and leaves: cgroup v2, or v1."""
    for folder in _groups(cgroup, own, ""):
        yield from _limit(folder / "memory.max", folder / "memory.current", "inactive_file")
    for folder in _groups(cgroup / "memory", own, "memory"):
        yield from _limit(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", "total_inactive_file")


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """``root`` and the folders below it that lead to the process's own group, as "0::/a/b" or "4:memory:/a/b" names it.

    In a container, the root is often the container's own group already.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    path = next((words[2] for words in lines if len(words) == 3 and controller in words[1].split(",")), "/")
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _limit(limit_file: Path, usage_file: Path, cached: str) -> Iterator[HostMemory]:
    try:
        limit, usage = (int(file.read_text()) for file in (limit_file, usage_file))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return
    # Cached files count as usage, and those not lately used are given up when memory is asked for.
    used = usage - _numbers(limit_file.with_name("memory.stat")).get(cached, 0)
    yield HostMemory(limit, max(limit - used, 0))


def _numbers(file: Path, unit: int = 1) -> dict[str, int]:
    """Lines of "name number" or "name: number kB", in bytes."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return {words[0].rstrip(":"): int(words[1]) * unit for words in lines if len(words) > 1}
    except (OSError, ValueError):
        return {}
