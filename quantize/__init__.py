"""Checkpoint readers, recipes, quantization and the neutral quantized checkpoint.

The names below are loaded when they are first used: NumPy and pydantic are not imported for those who need neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantize.calibration.estimate import CostEstimate
    from quantize.calibration.layer_weights import LayerWeights
    from quantize.calibration.runner import CalibrationTools, LayerRunner
    from quantize.calibration.settings import CalibrationSettings
    from quantize.calibration.text import calibration_file, text_sha256
    from quantize.checkpoint import Checkpoint, TensorInfo, open_checkpoint
    from quantize.pipeline import quantize_checkpoint
    from quantize.proof import StoredWeight, checkpoint_weights, described_weights, scheme_totals, worst_weights
    from quantize.quantized_tensor import QuantizedTensor, check_readable, load_weight
    from quantize.recipe import Recipe
    from quantize.recipe_files import list_recipes, load_recipe
    from quantize.report import QuantizeReport, TensorReport
    from quantize.resume import Resume
    from quantize.sensitivity.record import ChoiceRecord, read_choice

__all__ = [
    "CalibrationSettings",
    "CalibrationTools",
    "Checkpoint",
    "ChoiceRecord",
    "CostEstimate",
    "LayerRunner",
    "LayerWeights",
    "QuantizeReport",
    "QuantizedTensor",
    "Recipe",
    "Resume",
    "StoredWeight",
    "TensorInfo",
    "TensorReport",
    "calibration_file",
    "check_readable",
    "checkpoint_weights",
    "described_weights",
    "list_recipes",
    "load_recipe",
    "load_weight",
    "open_checkpoint",
    "quantize_checkpoint",
    "read_choice",
    "scheme_totals",
    "text_sha256",
    "worst_weights",
]

_MODULES = {
    "quantize.calibration.estimate": ("CostEstimate",),
    "quantize.calibration.layer_weights": ("LayerWeights",),
    "quantize.calibration.runner": ("CalibrationTools", "LayerRunner"),
    "quantize.calibration.settings": ("CalibrationSettings",),
    "quantize.calibration.text": ("calibration_file", "text_sha256"),
    "quantize.checkpoint": ("Checkpoint", "TensorInfo", "open_checkpoint"),
    "quantize.pipeline": ("quantize_checkpoint",),
    "quantize.proof": (
        "StoredWeight",
        "checkpoint_weights",
        "described_weights",
        "scheme_totals",
        "worst_weights",
    ),
    "quantize.quantized_tensor": ("QuantizedTensor", "check_readable", "load_weight"),
    "quantize.recipe": ("Recipe",),
    "quantize.recipe_files": ("list_recipes", "load_recipe"),
    "quantize.report": ("QuantizeReport", "TensorReport"),
    "quantize.resume": ("Resume",),
    "quantize.sensitivity.record": ("ChoiceRecord", "read_choice"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quantize' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
