"""What four bits cost a model, by the method that chooses them: perplexity, seconds and memory.

The linears are int4, symmetric, in groups of 64; embeddings and head stay as they are, so that nothing else differs.
Every method runs in a process of its own. Perplexity is that of windows of 512 tokens of TEXT through the float32
reference. Calibration is on the text that ships with Plansmith, unless --calibrate-on names another. "alone" and
"compensating" are the methods with the other setting of compensates_drift than their own.

usage: python benchmarks/quantize_quality.py MODEL --text FILE [--methods rtn awq ...] [--samples 16]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import builder
from plansmith.console import table
from quantize import CalibrationTools, open_checkpoint, quantize_checkpoint
from quantize.recipe import Recipe

WINDOW = 512
METHODS = ("none", "rtn", "importance", "awq", "gptq", "awq-compensating", "gptq-alone")


def make_recipe(method: str, arguments: argparse.Namespace) -> Recipe:
    rule: dict[str, Any] = {"scheme": "int4", "group_size": 64, "symmetric": True, "method": method.split("-")[0]}
    data: dict[str, Any] = {"name": method, "linears": {"scheme": "none"} if method == "none" else rule}
    if method not in ("none", "rtn"):
        data["calibration"] = {"num_samples": arguments.samples, "text": arguments.calibrate_on}
        data["calibration"]["compensates_drift"] = {"compensating": True, "alone": False}.get(method.partition("-")[2])
    return Recipe.model_validate(data)


def measure(method: str, arguments: argparse.Namespace) -> dict[str, float]:
    source = open_checkpoint(arguments.model)
    tokenizer = Tokenizer.from_str(source.side_files()["tokenizer.json"].decode())
    ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    with tempfile.TemporaryDirectory() as directory:
        report = quantize_checkpoint(
            arguments.model,
            Path(directory) / "out",
            make_recipe(method, arguments),
            calibration_tools=CalibrationTools(builder.calibration_runner),
        )
        usage = resource.getrusage(resource.RUSAGE_SELF)
        engine = builder.load_reference(Path(directory) / "out", num_blocks=-(-WINDOW // 32))
        measured = builder.perplexity(engine, ids, window=WINDOW, max_windows=arguments.windows)
    return {
        "perplexity": measured.perplexity,
        "seconds": report.seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "gigabytes": usage.ru_maxrss / 1e6,
    }


def recovered(method: str, perplexities: dict[str, float]) -> str:
    """Share of what rounding to nearest loses; empty for the two that it lies between."""
    if method in ("none", "rtn") or not perplexities.keys() >= {"none", "rtn"}:
        return ""
    lost = perplexities["rtn"] - perplexities["none"]
    return f"{(perplexities['rtn'] - perplexities[method]) / lost:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="to measure perplexity on")
    parser.add_argument("--calibrate-on", type=Path)
    parser.add_argument("--samples", type=int, default=16, help="windows of 512 tokens to calibrate on")
    parser.add_argument("--windows", type=int, default=8, help="windows to measure perplexity on")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments)))
        return
    rows, perplexities = [], {}
    for method in arguments.methods:
        command = [sys.executable, *sys.argv, "--child", method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        cells = [f"{found[key]:.{digits}f}" for key, digits in (("perplexity", 2), ("seconds", 0), ("cpu_seconds", 0))]
        perplexities[method] = found["perplexity"]
        rows.append([method, *cells, f"{found['gigabytes']:.2f}", recovered(method, perplexities)])
        print(f"{method}: {cells}", file=sys.stderr)
    print(table(["method", "perplexity", "seconds", "CPU seconds", "peak GB", "recovered"], rows))


if __name__ == "__main__":
    main()
