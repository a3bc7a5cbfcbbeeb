"""A linter for checkpoints: what config.json implies, against what is stored."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantize.lint.finding import Finding
    from quantize.lint.run import lint_checkpoint

__all__ = ["Finding", "lint_checkpoint"]

_MODULE_OF = {"Finding": "quantize.lint.finding", "lint_checkpoint": "quantize.lint.run"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quantize.lint' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
