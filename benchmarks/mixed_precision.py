"""What a choice of precision for each layer is worth: perplexity and KL divergence at equal bits per weight.

The linears are int4 (symmetric, groups of 64, round to nearest) or int8; embeddings and head stay as they are. Beside
the automatic choice by each sensitivity stand choices of the same size that need no measurement: random ones, and the
first and last layers at eight bits. Sensitivity is measured on the text that ships with Plansmith, unless
--calibrate-on names another; perplexity and KL divergence to the unquantized model on windows of 512 tokens of TEXT, in
the float32 reference.

usage: python benchmarks/mixed_precision.py MODEL --text FILE [--bits 4.5 5] [--windows 8]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import builder
from plansmith.console import table
from quantize import CalibrationTools, open_checkpoint, quantize_checkpoint
from quantize.recipe import Recipe

INT4 = {"scheme": "int4", "group_size": 64, "symmetric": True}
INT8 = {"scheme": "int8"}
UNIFORM: dict[str, dict[str, Any]] = {
    "int4 g64": INT4,
    "int4 g32": {**INT4, "group_size": 32},
    "int8": INT8,
}
SETS = ("self_attn.[qkv]_proj", "self_attn.o_proj", "mlp.[gu]*_proj", "mlp.down_proj")
WINDOW = 512


def automatic(bits: float, sensitivity: str, arguments: argparse.Namespace) -> dict[str, Any]:
    auto: dict[str, Any] = {
        "candidates": [INT4, INT8],
        "budget": {"bits_per_weight": bits},
        "sensitivity": sensitivity,
        "num_samples": arguments.samples,
    }
    text = {} if arguments.calibrate_on is None else {"calibration": {"text": arguments.calibrate_on}}
    return {"auto": auto, **(text if sensitivity != "weights" else {})}


def upgraded(patterns: list[str], sizes: dict[str, int], bits: float) -> dict[str, Any]:
    """int8 for the sets in the order of ``patterns`` as long as they fit, int4 for the rest."""
    left = (bits - 4.25) * sum(sizes.values())
    overrides = []
    for pattern in patterns:
        cost = (8 - 4.25) * 1.01 * sizes[pattern]  # scales of int8, one per output
        if cost <= left:
            left -= cost
            overrides.append({"match": pattern, **INT8})
    return {"linears": INT4, "overrides": overrides}


def set_sizes(model: Path) -> dict[str, int]:
    """Weights of each set of linears that run-times fuse, by a pattern of its names."""
    from fnmatch import fnmatchcase

    shapes = {info.name: info.shape for info in open_checkpoint(model) if len(info.shape) == 2}
    num_layers = open_checkpoint(model).config["num_hidden_layers"]
    patterns = [f"model.layers.{layer}.{module}.weight" for layer in range(num_layers) for module in SETS]
    return {
        pattern: sum(int(np.prod(shape)) for name, shape in shapes.items() if fnmatchcase(name, pattern))
        for pattern in patterns
    }


def outer_first(sizes: dict[str, int]) -> list[str]:
    layers = [int(pattern.split(".")[2]) for pattern in sizes]
    return sorted(sizes, key=lambda pattern: min(int(pattern.split(".")[2]), max(layers) - int(pattern.split(".")[2])))


def contenders(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    sizes = set_sizes(arguments.model)
    yield from ((f"uniform {name}", {"linears": rule}) for name, rule in UNIFORM.items())
    for bits in arguments.bits:
        for sensitivity in ("kl", "output", "weights"):
            yield f"auto {bits:g}, {sensitivity}", automatic(bits, sensitivity, arguments)
        yield f"first and last layers, {bits:g}", upgraded(outer_first(sizes), sizes, bits)
        for seed in range(arguments.seeds):
            order = [str(name) for name in np.random.default_rng(seed).permutation(list(sizes))]
            yield f"random {seed}, {bits:g}", upgraded(order, sizes, bits)


def measure(recipe: Recipe, ids: list[int], arguments: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "out"
        report = quantize_checkpoint(
            arguments.model, output, recipe, calibration_tools=CalibrationTools(builder.calibration_runner)
        )
        blocks = -(-WINDOW // 32)
        engine, baseline = (builder.load_reference(path, num_blocks=blocks) for path in (output, arguments.model))
        compared = builder.compare_engines(engine, baseline, ids, window=WINDOW, max_windows=arguments.windows)
        predicted = open_checkpoint(output).config["quantization_config"].get("auto", {}).get("predicted_error")
    linears = [tensor for tensor in report.tensors if tensor.name.endswith("_proj.weight")]
    bits = 8 * sum(tensor.bytes_out for tensor in linears) / sum(int(np.prod(tensor.shape)) for tensor in linears)
    return [
        f"{bits:.3f}",
        f"{compared.perplexity.perplexity:.2f}",
        f"{compared.kl_per_token:.4f}",
        "" if predicted is None else f"{predicted:.4g}",
        f"{report.seconds:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to measure perplexity and KL divergence on")
    parser.add_argument("--calibrate-on", type=Path, help="to measure sensitivity on")
    parser.add_argument("--samples", type=int, default=2, help="windows of 256 tokens to measure sensitivity on")
    parser.add_argument("--bits", type=float, nargs="+", default=[4.5, 5.0], help="budgets, bits per weight")
    parser.add_argument("--seeds", type=int, default=2, help="random choices for each budget")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--only", default="", help="contenders whose names hold this")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_str(open_checkpoint(arguments.model).side_files()["tokenizer.json"].decode())
    ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    rows = []
    for name, data in contenders(arguments):
        if arguments.only not in name:
            continue
        rows.append([name, *measure(Recipe.model_validate({"name": name, **data}), ids, arguments)])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(["linears", "bits per weight", "perplexity", "KL", "predicted", "seconds"], rows))


if __name__ == "__main__":
    main()
