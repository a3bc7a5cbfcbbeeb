"""The checkpoint that is exported: whole, of one scheme, with everything about it checked from headers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plansmith_errors import ExportError
from quantize.activations import input_scale_name, kv_scale_name
from quantize.checkpoint import Checkpoint, open_checkpoint
from quantize.export.casting import cast
from quantize.export.scheme import LinearScheme, common_scheme, linear_schemes
from quantize.model_shape import ModelShape
from quantize.quantized_tensor import QUANT_METHOD, QuantizedTensor, load_weight


@dataclass(frozen=True)
class ExportSource:
    checkpoint: Checkpoint
    shape: ModelShape
    scheme: LinearScheme  # of the linears that are quantized; MIXED where there are several
    schemes: dict[str, LinearScheme]  # of every linear weight of the decoder
    dtype: np.dtype[Any]  # of everything that is not quantized
    kv_cache: str | None = None  # fp8 or int8, where scales of keys and values are stored

    @cached_property
    def unquantized_modules(self) -> list[str]:
        """Linear layers of the decoder that stay in ``dtype``, without ".weight"."""
        if self.scheme.name == "none":
            return []
        return [name.removesuffix(".weight") for name, scheme in self.schemes.items() if scheme.name == "none"]

    @cached_property
    def quantized_schemes(self) -> list[LinearScheme]:
        """Each scheme once, in the order of use."""
        return list(dict.fromkeys(scheme for scheme in self.schemes.values() if scheme.name != "none"))

    def kv_scale(self, weight: str) -> npt.NDArray[np.float32] | None:
        """[] of the keys or values that a linear writes; None where none is stored."""
        name = kv_scale_name(weight)
        return None if self.kv_cache is None or name is None else self.checkpoint.load_float32(name)

    def weight(self, name: str) -> QuantizedTensor:
        """A linear weight as it is stored."""
        return load_weight(self.checkpoint, name)

    def floats(self, name: str) -> npt.NDArray[Any]:
        """Any tensor in ``dtype``; one that is quantized is dequantized."""
        return cast(name, self._float_values(name), self.dtype)

    def _float_values(self, name: str) -> npt.NDArray[Any]:
        tensor = load_weight(self.checkpoint, name)
        return tensor.values if tensor.scheme == "none" else tensor.dequantize()


def open_source(path: Path) -> Checkpoint:
    """Open a neutral quantized checkpoint or an original model. Raises CheckpointError or ExportError."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else config
    if (method and method != QUANT_METHOD) or (path / "hf_quant_config.json").exists():
        raise ExportError(
            f"{path}: is quantized by {method or 'modelopt'}; "
            "give what plansmith quantize makes of it, or an original model"
        )
    return checkpoint


def describe_source(checkpoint: Checkpoint, dtype: np.dtype[Any]) -> ExportSource:
    """Check that every tensor is there in its shape, and find the scheme. Reads headers only."""
    from quantize.lint.hf import lint_hf

    findings = lint_hf(checkpoint)
    if findings:
        more = f" (and {len(findings) - 1} more; plansmith lint lists them)" if len(findings) > 1 else ""
        raise ExportError(f"{checkpoint.path}: {findings[0]}{more}; quantize it again")
    shape = ModelShape.from_config({**checkpoint.config, "tie_word_embeddings": checkpoint.is_tied}, "config.json")
    schemes = linear_schemes(checkpoint, shape)
    kv_cache = ((checkpoint.config.get("quantization_config") or {}).get("kv_cache") or {}).get("scheme")
    source = ExportSource(checkpoint, shape, common_scheme(schemes), schemes, dtype, kv_cache)
    _check_scales(source)
    return source


def _check_scales(source: ExportSource) -> None:
    """Static scales that are no positive numbers: a run-time would load them and answer nonsense."""
    bad = [name.removesuffix(".weight") for name in source.schemes if not _has_scales(source, name)]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ExportError(
            f"{source.checkpoint.path}: static scales of {', '.join(bad[:3])}{more} are no positive numbers: they "
            "were not calibrated; quantize the model again"
        )


def _has_scales(source: ExportSource, name: str) -> bool:
    activations, kv_scale = source.schemes[name].activations, kv_scale_name(name)
    wanted = [input_scale_name(name)] if activations is not None and activations.scale == "static" else []
    wanted += [kv_scale] if source.kv_cache is not None and kv_scale is not None else []
    found = [source.checkpoint.load_float32(scale) for scale in wanted]
    return all(bool(np.isfinite(scale).all() and (scale > 0).all()) for scale in found)
