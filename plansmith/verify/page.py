"""A report as one HTML file that needs nothing else: no script, no style sheet, no font from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from plansmith.console import human_bytes
from plansmith.verify import chart
from plansmith.verify.template import TEMPLATE
from plansmith.verify.text import measurement_rows, scheme_rows
from plansmith.version import __version__
from plansmith_errors import ArtifactError


def check_page_path(path: Path) -> None:
    """Refuse, before any work, a place where the page cannot be written. Raises ArtifactError."""
    try:
        exists, has_folder = path.exists(), path.parent.is_dir()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None
    if exists:
        raise ArtifactError(f"{path}: exists already; remove it or name another file")
    if not has_folder or not os.access(path.parent, os.W_OK):
        raise ArtifactError(f"{path}: cannot be written: {path.parent} is no directory that can be written to")


def write_page(path: Path, report: dict[str, Any]) -> None:
    """Write the page whole or not at all. Raises ArtifactError when the disk refuses."""
    write_whole(path, render_page(report))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ArtifactError when the disk refuses."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def render_page(report: dict[str, Any]) -> str:
    """HTML of a report; every name in it is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    weights = [
        {
            "name": weight["name"],
            "kind": weight["kind"],
            "stored": human_bytes(weight["nbytes"]),
            "bits": f"{weight['bits_per_weight']:.2f}",
            "error": f"{weight['relative_error']:.4f}",
        }
        for weight in report["weights"]
    ]
    return environment.from_string(TEMPLATE).render(
        report=report,
        measurements=measurement_rows(report),
        schemes=scheme_rows(report["schemes"]),
        weights=weights,
        chart=chart.make_chart(report["weights"]),
        geometry=chart,
        version=__version__,
    )
