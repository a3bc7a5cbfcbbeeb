"""README.md of an export: what it is, how it was made, and what that cost."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from quantize.export.options import LABELS, ExportOptions
from quantize.export.source import ExportSource


def model_card(source: ExportSource, options: ExportOptions) -> str:
    """Markdown. The same export gives the same text."""
    quantized = source.checkpoint.config.get("quantization_config") or {}
    lines = [
        f"# {source.shape.model_type} model, {source.scheme}, in the layout {options.format}",
        "",
        f"Written by `plansmith export --format {options.format}` for {LABELS[options.resolved_consumer]}.",
        "",
        f"- Linear layers: {source.scheme}; embeddings, norms and output head: {source.dtype.name}.",
    ]
    if source.unquantized_modules:
        lines.append(f"- Not quantized: {', '.join(source.unquantized_modules)}.")
    if options.format == "trtllm":
        lines.append(f"- Ranks: tp {options.tp_size} x pp {options.pp_size}, one rankN.safetensors each.")
    origin = (quantized.get("source") or {}).get("origin", source.checkpoint.origin)
    lines.append(f"- Values of the original: {origin}.")
    error = _relative_error(source, quantized)
    if error is not None:
        lines.append(f"- Relative error of the quantized weights (Frobenius norms, mean over weights): {error:.4f}.")
    if quantized.get("recipe"):
        lines += ["", "Recipe:", "", "```json", json.dumps(quantized["recipe"], indent=2), "```"]
    hashes = (quantized.get("source") or {}).get("sha256") or {}
    if hashes:
        lines += ["", "SHA-256 of the files it was made from:", ""]
        lines += [f"- `{digest}` {name}" for name, digest in hashes.items()]
    return "\n".join(lines) + "\n"


def _relative_error(source: ExportSource, quantized: dict[str, Any]) -> float | None:
    """Weighted by the number of values."""
    entries = quantized.get("tensors") or {}
    weighted = [
        (float(entries[name].get("relative_error", 0.0)), prod((linear.out_features, linear.in_features)))
        for name, linear in source.shape.linear_weights()
        if source.schemes[name].name != "none"
    ]
    total = sum(size for _, size in weighted)
    return sum(error * size for error, size in weighted) / total if total else None
