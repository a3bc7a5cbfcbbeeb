"""Geometry of the plot: where each GPU's memory goes, and decode throughput by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from builder.planner.layout import Layout
from builder.planner.plan import CapacityPlan
from plansmith.console import human_bytes

WIDTH = 960
LEFT, RIGHT = 190, 14  # room for labels
ROW_HEIGHT, BAR_HEIGHT = 24, 16
PANEL_HEIGHT = 260  # of the curves
_MOST_BARS, _MOST_CURVES = 16, 5
_LONGEST_BAR = 1.5  # times the memory of a GPU: what is longer is cut off
_COLOURS = {
    "weights": "#2b6cb0",
    "activations": "#c05621",
    "logits": "#b83280",
    "reserved": "#718096",
    "margin": "#cbd5e0",
    "kv_cache": "#2f855a",
}
_TITLES = {
    "weights": "weights",
    "activations": "activations",
    "logits": "logits",
    "reserved": "context, NCCL",
    "margin": "margin",
    "kv_cache": "KV cache",
}
_CURVE_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280")


@dataclass(frozen=True)
class Part:
    x: float
    width: float
    colour: str
    title: str  # shown when the pointer rests on it


@dataclass(frozen=True)
class Bar:
    label: str
    fits: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Curve:
    label: str
    colour: str
    points: str  # of an SVG polyline
    end: tuple[float, float]


@dataclass(frozen=True)
class Chart:
    bars: tuple[Bar, ...]
    capacity_x: float  # where the memory of a GPU ends
    memory_ticks: tuple[tuple[float, str], ...]
    curves: tuple[Curve, ...]
    batch_ticks: tuple[tuple[float, str], ...]
    speed_ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]  # (colour, what it stands for)

    @property
    def bars_height(self) -> int:
        return len(self.bars) * ROW_HEIGHT + 26

    @property
    def height(self) -> int:
        return self.bars_height + (PANEL_HEIGHT + 90 if self.curves else 40)


def make_chart(plan: CapacityPlan) -> Chart:
    layouts = _worth_a_bar(plan)
    memory = plan.request.gpu.memory_bytes
    full = min(max(memory, *(_used(layout) for layout in layouts)), _LONGEST_BAR * memory)
    per_byte = (WIDTH - LEFT - RIGHT) / full
    curves, batch_ticks, speed_ticks = _curves(plan)
    return Chart(
        bars=tuple(_bar(layout, per_byte) for layout in layouts),
        capacity_x=round(LEFT + memory * per_byte, 2),
        memory_ticks=tuple(
            (round(LEFT + full * part / 4 * per_byte, 2), human_bytes(full * part / 4)) for part in range(5)
        ),
        curves=curves,
        batch_ticks=batch_ticks,
        speed_ticks=speed_ticks,
        legend=tuple((_COLOURS[key], title) for key, title in _TITLES.items()),
    )


def _worth_a_bar(plan: CapacityPlan) -> list[Layout]:
    """All, or the first of those that fit where they are many."""
    if len(plan.layouts) <= _MOST_BARS:
        return list(plan.layouts)
    return [layout for layout in plan.layouts if layout.fits][:_MOST_BARS] or list(plan.layouts[:_MOST_BARS])


def _used(layout: Layout) -> int:
    part = layout.footprint
    return part.reserved + part.weights + part.activations + part.logits


def _bar(layout: Layout, per_byte: float) -> Bar:
    x, parts = float(LEFT), []
    for key, title in _TITLES.items():
        nbytes = max(getattr(layout.footprint, key), 0)
        width = min(nbytes * per_byte, WIDTH - RIGHT - x)
        if width > 0:
            parts.append(Part(round(x, 2), round(width, 2), _COLOURS[key], f"{title}: {human_bytes(nbytes)}"))
            x += width
    return Bar(layout_label(layout), layout.fits, tuple(parts))


def layout_label(layout: Layout) -> str:
    parallelism = layout.parallelism
    experts = f" ep {parallelism.ep_size}" if parallelism.ep_size > 1 else ""
    return f"tp {parallelism.tp_size} pp {parallelism.pp_size}{experts}"


def _curves(
    plan: CapacityPlan,
) -> tuple[tuple[Curve, ...], tuple[tuple[float, str], ...], tuple[tuple[float, str], ...]]:
    """Tokens per second of the quickest layout of each number of GPUs, up to the largest batch that fits."""
    measured = [(layout, _speeds(layout)) for layout in _quickest(plan)]
    if not measured:
        return (), (), ()
    most = max(batch for _, points in measured for batch, _ in points)
    fastest = max(speed for _, points in measured for _, speed in points)
    scale_x = (WIDTH - LEFT - RIGHT) / max(math.log2(most), 1.0)
    curves = tuple(
        _curve(layout, [(LEFT + math.log2(b) * scale_x, PANEL_HEIGHT * (1 - s / fastest)) for b, s in points], colour)
        for (layout, points), colour in zip(measured, _CURVE_COLOURS, strict=False)
    )
    powers = range(int(math.log2(most)) + 1)
    batch_ticks = tuple((round(LEFT + power * scale_x, 2), str(2**power)) for power in powers)
    speed_ticks = tuple((round(PANEL_HEIGHT * (1 - part / 4), 2), f"{fastest * part / 4:.0f}") for part in range(5))
    return curves, batch_ticks, speed_ticks


def _quickest(plan: CapacityPlan) -> list[Layout]:
    best: dict[int, Layout] = {}
    for layout in plan.layouts:
        known = best.get(layout.parallelism.world_size)
        if layout.fits and layout.largest_batch and (known is None or _quicker(layout, known)):
            best[layout.parallelism.world_size] = layout
    return list(best.values())[:_MOST_CURVES]


def _quicker(layout: Layout, known: Layout) -> bool:
    return layout.decode(1).seconds < known.decode(1).seconds


def _speeds(layout: Layout) -> list[tuple[int, float]]:
    largest = layout.largest_batch
    batches = sorted({*(2**power for power in range(int(math.log2(largest)) + 1)), largest})
    return [(batch, layout.decode(batch).tokens_per_second) for batch in batches]


def _curve(layout: Layout, points: Sequence[tuple[float, float]], colour: str) -> Curve:
    rounded = [(round(x, 2), round(y, 2)) for x, y in points]
    return Curve(layout_label(layout), colour, " ".join(f"{x},{y}" for x, y in rounded), rounded[-1])
