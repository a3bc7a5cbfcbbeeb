"""Peak memory of ``plansmith quantize`` on a checkpoint of the shape of a 13B Llama, against its bound.

    python benchmarks/quantize_memory.py --work DIR [--layers 40] [--calibrated-layers 1] [RECIPE ...]

Writes a sharded bfloat16 checkpoint of random weights (40 layers: 26 GB) into DIR and removes every output once it is
measured. The bound is 1.5 GB + 3 x the largest decoder layer as it is stored, in bfloat16. What is measured is the
largest resident set of the process as the kernel accounts it (ru_maxrss): it counts mapped pages of the source too.
A calibrated recipe sees the first layers alone, as a model of that many, and the default sample: memory does not grow
with depth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

HIDDEN, INNER, VOCAB, HEADS = 5120, 13824, 32000, 40
LAYERS_PER_SHARD = 4
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
RECIPES = ("fp8", "int4-rtn", "int4-importance", "int4-awq", "int4-gptq")
LAYER = {
    "input_layernorm": (HIDDEN,),
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYER_BYTES = 2 * sum(prod(shape) for shape in LAYER.values())
BOUND = 1.5e9 + 3 * LAYER_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--work", type=Path, required=True, help="directory for the checkpoint and the outputs")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--calibrated-layers", type=int, default=1)
    arguments = parser.parse_args()
    print(f"largest layer {LAYER_BYTES / 1e9:.2f} GB, bound {BOUND / 1e9:.2f} GB")
    print(f"{'recipe':<18}{'layers':>7}{'source GB':>11}{'seconds':>9}{'peak GB':>9}  within")
    for recipe in arguments.recipes:
        calibrated = recipe.split("-")[-1] in ("importance", "awq", "gptq")
        num_layers = arguments.calibrated_layers if calibrated else arguments.layers
        source = checkpoint(arguments.work, num_layers)
        size = sum(file.stat().st_size for file in source.iterdir())
        seconds, peak = measure(source, arguments.work / "out", recipe)
        within = "yes" if peak <= BOUND else "NO"
        print(f"{recipe:<18}{num_layers:>7}{size / 1e9:>11.1f}{seconds:>9.0f}{peak / 1e9:>9.2f}  {within}", flush=True)


def measure(source: Path, output: Path, recipe: str) -> tuple[float, float]:
    """Seconds and peak bytes of one process."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "plansmith", "quantize", str(source), "-o", str(output), "--recipe", recipe, "-q"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    shutil.rmtree(output, ignore_errors=True)
    if status != 0:
        sys.exit(f"{' '.join(command)}: failed")
    return seconds, usage.ru_maxrss * 1024.0


def checkpoint(work: Path, num_layers: int) -> Path:
    """Write it, or find it written."""
    path = work / f"llama-13b-{num_layers}"
    if (path / "config.json").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    # 64 MB of random weights over and over: what they are does not change how much memory rounding them takes.
    block = (np.random.default_rng(0).standard_normal(2**25, np.float32) * np.float32(0.02)).astype(BFLOAT16).tobytes()
    shards = [{"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}]
    for begin in range(0, num_layers, LAYERS_PER_SHARD):
        layers = range(begin, min(begin + LAYERS_PER_SHARD, num_layers))
        shards.append({f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in LAYER.items()})
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(path / file_name, shard, block)
        weight_map |= {f"{name}.weight": file_name for name in shard}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config(num_layers)))
    return path


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: bytes) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while position:
            position -= file.write(block[:position])


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))


def config(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
