"""Geometry of the chart of errors: one row of bars per module, one bar per decoder layer, one scale for all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

WIDTH = 960
LABEL_WIDTH = 190
ROW_HEIGHT = 64
BAR_HEIGHT = 46  # of the largest error
_RIGHT = 12
_WIDEST_BAR = 18.0
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.weight")
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#718096", "#975a16", "#0987a0")


@dataclass(frozen=True)
class Bar:
    x: float
    y: float  # from the top of its row
    width: float
    height: float
    colour: str
    title: str  # shown when the pointer rests on it


@dataclass(frozen=True)
class Row:
    module: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    rows: tuple[Row, ...]
    largest: float  # relative error of the highest bar
    ticks: tuple[tuple[float, int], ...]  # (x, layer)
    legend: tuple[tuple[str, str], ...]  # (colour, scheme)

    @property
    def height(self) -> int:
        return len(self.rows) * ROW_HEIGHT + 30


def make_chart(weights: list[dict[str, Any]]) -> Chart:
    """``weights`` as the report lists them, in its order; matrices outside the layers get a row with one bar."""
    places = [_place(weight["name"]) for weight in weights]
    num_layers = 1 + max((layer for _, layer in places), default=0)
    pitch = (WIDTH - LABEL_WIDTH - _RIGHT) / num_layers
    largest = max((weight["relative_error"] for weight in weights), default=0.0)
    kinds = list(dict.fromkeys(weight["kind"] for weight in weights))
    colours = {kind: _COLOURS[index % len(_COLOURS)] for index, kind in enumerate(kinds)}
    rows: dict[str, list[Bar]] = {}
    for weight, (module, layer) in zip(weights, places, strict=True):
        height = BAR_HEIGHT * weight["relative_error"] / largest if largest else 0.0
        bar = Bar(
            x=round(LABEL_WIDTH + layer * pitch, 2),
            y=round(ROW_HEIGHT - height, 2),
            width=round(min(0.8 * pitch, _WIDEST_BAR), 2),
            height=round(height, 2),
            colour=colours[weight["kind"]],
            title=f"{weight['name']}: {weight['kind']}, {weight['bits_per_weight']:.2f} bits per weight, "
            f"relative error {weight['relative_error']:.4f}",
        )
        rows.setdefault(module, []).append(bar)
    step = max(1, num_layers // 10)
    middle = min(0.8 * pitch, _WIDEST_BAR) / 2
    ticks = [(round(LABEL_WIDTH + layer * pitch + middle, 2), layer) for layer in range(0, num_layers, step)]
    return Chart(
        tuple(Row(module, tuple(bars)) for module, bars in rows.items()),
        largest,
        tuple(ticks),
        tuple((colours[kind], kind) for kind in kinds),
    )


def _place(name: str) -> tuple[str, int]:
    """(module, layer); a matrix outside the layers stands under its own name."""
    match = _LAYER.fullmatch(name)
    return (match.group(2), int(match.group(1))) if match else (name.removesuffix(".weight"), 0)
