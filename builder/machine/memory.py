"""RAM that this process may use: the system's, or less where a container limits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    available_bytes: int


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> HostMemory | None:
    """None where the system does not tell, as outside Linux."""
    system = _numbers(meminfo, unit=1024)
    if "MemTotal" not in system or "MemAvailable" not in system:
        return None
    total, available = system["MemTotal"], system["MemAvailable"]
    limit = _limit(cgroup)
    if limit is not None and limit.total_bytes < total:
        return HostMemory(limit.total_bytes, min(available, limit.available_bytes))
    return HostMemory(total, available)


def _limit(cgroup: Path) -> HostMemory | None:
    """The container's limit and what it leaves: cgroup v2, else v1."""
    v1 = cgroup / "memory"
    for limit_file, usage_file in (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (int(file.read_text()) for file in (limit_file, usage_file))
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        # Cached files count as usage, and those not lately used are given up when memory is asked for.
        used = usage - _numbers(limit_file.with_name("memory.stat")).get("inactive_file", 0)
        return HostMemory(limit, max(limit - used, 0))
    return None


def _numbers(file: Path, unit: int = 1) -> dict[str, int]:
    """Lines of "name number" or "name: number kB", in bytes."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return {words[0].rstrip(":"): int(words[1]) * unit for words in lines if len(words) > 1}
    except (OSError, ValueError):
        return {}
