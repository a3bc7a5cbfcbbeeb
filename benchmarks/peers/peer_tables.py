"""The results as tables, and the ratios that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from peers.comparison import COPY, PEERS, PLANSMITH, Row
from peers.measured_process import Cost

from plansmith.console import table


@dataclass
class Results:
    """Of one model. A row that has no cost has a reason."""

    costs: dict[str, Cost] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Cost] = field(default_factory=dict)  # of the bytes that a row of Plansmith moved
    perplexities: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, cost: Cost) -> None:
        self.costs[key] = cost.better(self.costs.get(key))

    def add_copy(self, key: str, cost: Cost) -> None:
        self.copies[key] = cost.better(self.copies.get(key))

    def copy_share(self, key: str) -> float | None:
        """Speed of a row as a share of a plain copy's of the same bytes, read and written."""
        if key not in self.copies or key not in self.costs:
            return None
        return self.copies[key].wall / self.costs[key].wall


def uncalibrated_table(rows: Sequence[Row], results: Results, read_bytes: int) -> str:
    """``read_bytes``: of the model, which every row reads once."""
    headers = ["job", "wall s", "CPU s", "of it start", "peak GB", "output GB", "moved GB/s", "of a copy"]
    lines = []
    for row in rows:
        lines.append([f"{row.tool} {row.says}", *_cells(row.key, results), *_speed_cells(row.key, results, read_bytes)])
    if COPY in results.costs or COPY in results.reasons:
        speed = _speed_cells(COPY, results, read_bytes)
        lines.append(["plain copy of the whole model", *_cells(COPY, results), *speed])
    return table(headers, lines)


def calibrated_table(rows: Sequence[Row], results: Results) -> str:
    headers = ["job", "wall s", "CPU s", "of it start", "peak GB", "perplexity"]
    lines = []
    for row in rows:
        found = results.perplexities.get(row.key)
        missing = results.reasons.get(row.key, "-") if row.key in results.costs else "-"
        lines.append(
            [f"{row.tool} {row.says}", *_cells(row.key, results), missing if found is None else f"{found:.2f}"]
        )
    if "none" in results.perplexities:
        lines.append(["not quantized", "-", "-", "-", "-", f"{results.perplexities['none']:.2f}"])
    return table(headers, lines)


def ratio_lines(rows: Sequence[Row], results: Results) -> list[str]:
    """What Plansmith's rows cost beside the fastest peer of the same scheme."""
    lines = []
    for row in rows:
        if row.tool != PLANSMITH or row.key not in results.costs:
            continue
        ours = results.costs[row.key]
        rivals = [other for other in rows if other.scheme == row.scheme and other.tool in PEERS]
        line = _beside_peers(ours, [results.costs[rival.key] for rival in rivals if rival.key in results.costs])
        best = min((results.perplexities.get(rival.key, inf) for rival in rivals), default=inf)
        if best < inf and row.key in results.perplexities:
            line.append(f"perplexity {results.perplexities[row.key] / best - 1:+.1%} to the better peer's")
        share = results.copy_share(row.key)
        if share is not None:
            line.append(f"{share:.0%} of the speed of a plain copy of the same bytes")
        lines += [f"{row.tool} {row.says}: {', '.join(line)}"] if line else []
    return lines


def _beside_peers(ours: Cost, peers: Sequence[Cost]) -> list[str]:
    if not peers:
        return []
    cpu = min(cost.cpu for cost in peers)
    words = [
        f"of the fastest peer's CPU seconds {ours.cpu / cpu:.2f}",
        f"wall time {ours.wall / min(cost.wall for cost in peers):.2f}",
    ]
    works = [cost.cpu - cost.startup for cost in peers if cost.startup is not None]
    if works and ours.startup is not None:
        words.append(f"CPU seconds without start-up {(ours.cpu - ours.startup) / min(works):.2f}")
    return words


def _cells(key: str, results: Results) -> list[str]:
    cost = results.costs.get(key)
    if cost is None:
        return [results.reasons.get(key, "not run"), "-", "-", "-"]
    startup = "-" if cost.startup is None else f"{cost.startup:.1f}"
    return [f"{cost.wall:.1f}", f"{cost.cpu:.1f}", startup, f"{cost.peak_bytes / 1e9:.2f}"]


def _speed_cells(key: str, results: Results, read_bytes: int) -> list[str]:
    cost, share = results.costs.get(key), results.copy_share(key)
    if cost is None:
        return ["-", "-", "-"]
    moved = (read_bytes + cost.written) / cost.wall / 1e9
    return [f"{cost.written / 1e9:.2f}", f"{moved:.2f}", "-" if share is None else f"{share:.0%}"]
