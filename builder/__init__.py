"""From a checkpoint to an engine: model spec, the network written once, its targets, the engine artifact.

The names below are loaded when they are first used, so that reading a build file does not import NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from builder.build_check import build_identity
    from builder.calibration import calibration_runner
    from builder.choices import MultipleChoice, Question, multiple_choice
    from builder.comparison import Comparison, compare_engines
    from builder.engine import build_engine, load_engine, load_reference
    from builder.manifest import EngineManifest, read_manifest
    from builder.model_spec import ModelSpec
    from builder.network_gate.gate import GateReport
    from builder.network_gate.verify import verify_network
    from builder.options import BuildOptions
    from builder.plan_layout import plan_layout
    from builder.scoring import Perplexity, perplexity
    from builder.targets.support import check_supported

__all__ = [
    "BuildOptions",
    "Comparison",
    "EngineManifest",
    "GateReport",
    "ModelSpec",
    "MultipleChoice",
    "Perplexity",
    "Question",
    "build_engine",
    "build_identity",
    "calibration_runner",
    "check_supported",
    "compare_engines",
    "load_engine",
    "load_reference",
    "multiple_choice",
    "perplexity",
    "plan_layout",
    "read_manifest",
    "verify_network",
]

_MODULES = {
    "builder.build_check": ("build_identity",),
    "builder.choices": ("MultipleChoice", "Question", "multiple_choice"),
    "builder.comparison": ("Comparison", "compare_engines"),
    "builder.calibration": ("calibration_runner",),
    "builder.engine": ("build_engine", "load_engine", "load_reference"),
    "builder.manifest": ("EngineManifest", "read_manifest"),
    "builder.model_spec": ("ModelSpec",),
    "builder.network_gate.verify": ("verify_network",),
    "builder.network_gate.gate": ("GateReport",),
    "builder.options": ("BuildOptions",),
    "builder.plan_layout": ("plan_layout",),
    "builder.scoring": ("Perplexity", "perplexity"),
    "builder.targets.support": ("check_supported",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'builder' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
