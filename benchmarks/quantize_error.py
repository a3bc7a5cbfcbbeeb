"""What each scheme does to the values of weights: relative error and bits per weight.

usage: python benchmarks/quantize_error.py SmolLM2-135M-Instruct.Q4_1.gguf

The linears of the model, and a layer of Gaussian weights, go through the quantizer; the errors are those of its report.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from plansmith.console import table
from plansmith_errors import QuantizeError
from quantize import Recipe, quantize_checkpoint
from quantize.architectures import role_of


def _int4(group_size: int, symmetric: bool, scale: str) -> tuple[str, dict[str, Any]]:
    kind = "symmetric" if symmetric else "zero points"
    rule = {"scheme": "int4", "group_size": group_size, "symmetric": symmetric, "scale": scale}
    return f"int4 g{group_size} {kind}, {scale}", rule


INT4_FORMS = ((128, True), (64, True), (64, False))
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    *(_int4(group_size, symmetric, scale) for group_size, symmetric in INT4_FORMS for scale in ("absmax", "mse")),
    *((f"nvfp4, {scale}", {"scheme": "nvfp4", "scale": scale}) for scale in ("absmax", "four-over-six", "mse")),
    *((f"mxfp4, {scale}", {"scheme": "mxfp4", "scale": scale}) for scale in ("ceil", "ocp", "best-of-two")),
    ("mxfp8", {"scheme": "mxfp8"}),
    *((f"fp8, {kind}", {"scheme": "fp8", "granularity": kind}) for kind in ("tensor", "channel", "block")),
    ("int8", {"scheme": "int8"}),
]
HIDDEN, FFN = 1024, 2048


def write_gaussian(directory: Path) -> Path:
    """One Llama layer of standard normal weights, float32."""
    rng = np.random.default_rng(0)
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    weights = {
        f"model.layers.0.{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    for name in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.embed_tokens.weight"] = np.ones((8, HIDDEN), np.float32)
    config = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def measure(source: Path, rule: dict[str, Any]) -> tuple[str, str]:
    """Bits per weight and relative error of the linears; dashes where a group does not divide one of them."""
    recipe = Recipe.model_validate({"name": "benchmark", "linears": rule})
    with tempfile.TemporaryDirectory() as output:
        try:
            report = quantize_checkpoint(source, Path(output), recipe)
        except QuantizeError as error:
            print(error, file=sys.stderr)
            return "-", "-"
    tensors = [tensor for tensor in report.tensors if role_of(tensor.name) == "linear"]
    squared = sum(tensor.squared_error for tensor in tensors) / sum(tensor.squared_norm for tensor in tensors)
    bits = 8 * sum(tensor.bytes_out for tensor in tensors) / sum(prod(tensor.shape) for tensor in tensors)
    return f"{bits:.2f}", f"{sqrt(squared):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    model: Path = parser.parse_args().model
    with tempfile.TemporaryDirectory() as scratch:
        gaussian = write_gaussian(Path(scratch) / "gaussian")
        rows = [[name, *measure(gaussian, rule), measure(model, rule)[1]] for name, rule in SCHEMES]
    print(table(["scheme", "bits per weight", "error, Gaussian", f"error, {model.name}"], rows))


if __name__ == "__main__":
    main()
