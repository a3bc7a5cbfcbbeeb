"""The plot of a capacity plan as one SVG, or as an HTML page with the tables; neither needs anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.planner.plan import CapacityPlan
from plansmith.capacity import chart
from plansmith.capacity.template import PAGE, SVG
from plansmith.capacity.text import closing_text, summary_lines, tables
from plansmith.verify.page import check_page_path, write_whole
from plansmith.version import __version__
from plansmith_errors import ConfigError

_SUFFIXES = (".svg", ".html")


def check_plot_path(path: Path) -> None:
    """Refuse, before any work, a place or a kind of file that cannot be written. Raises ConfigError, ArtifactError."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    check_page_path(path)


def write_plot(path: Path, report: dict[str, Any], plan: CapacityPlan) -> None:
    """Write the file whole or not at all. Raises ArtifactError when the disk refuses."""
    write_whole(path, render_svg(report, plan) if path.suffix == ".svg" else render_page(report, plan))


def render_svg(report: dict[str, Any], plan: CapacityPlan) -> str:
    return _render(SVG, report=report, chart=chart.make_chart(plan), geometry=chart)


def render_page(report: dict[str, Any], plan: CapacityPlan) -> str:
    """HTML; every name in it is escaped."""
    from markupsafe import Markup

    return _render(
        PAGE,
        report=report,
        svg=Markup(render_svg(report, plan)),  # made of escaped parts
        summary="\n".join(summary_lines(report)),
        closing=closing_text(report),
        tables=tables(report),
        version=__version__,
    )


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(**values)
