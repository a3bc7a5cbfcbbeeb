"""Neutral quantized checkpoints out to the layouts that GPU run-times load."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantize.export.options import ExportOptions
    from quantize.export.pipeline import ExportReport, export_checkpoint

__all__ = ["ExportOptions", "ExportReport", "export_checkpoint"]

_MODULE_OF = {
    "ExportOptions": "quantize.export.options",
    "ExportReport": "quantize.export.pipeline",
    "export_checkpoint": "quantize.export.pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quantize.export' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
