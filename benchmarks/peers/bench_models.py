"""The models of the comparison, made once: bench_models.py mid|smollm2 DIRECTORY [MODEL.gguf]

Each directory is a bfloat16 Hugging Face model that every tool reads. Beside it lie the text of its calibration and
the windows of token ids that Plansmith chooses from that text, which the other tools are given. A process of its own
makes them: the peak memory of the benchmark itself would show in the rows.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from comparison import MODELS, recipe_of
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from quantize import CalibrationSettings, CalibrationTools, Recipe, calibration_file, open_checkpoint
from quantize import quantize_checkpoint as quantize
from quantize.calibration.sample import load_sample

MID = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LINEARS = {  # rows, columns
    "self_attn.q_proj": (2048, 2048),
    "self_attn.k_proj": (512, 2048),
    "self_attn.v_proj": (512, 2048),
    "self_attn.o_proj": (2048, 2048),
    "mlp.gate_proj": (5632, 2048),
    "mlp.up_proj": (5632, 2048),
    "mlp.down_proj": (2048, 5632),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_STANDARD_DEVIATION = 0.02
_WORDS_OF_TEXT = 20000


def mid_shapes() -> dict[str, tuple[int, ...]]:
    """Tensor name to shape: 0.85 billion parameters."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, 2048)}
    for layer in range(16):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _LINEARS.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (2048,) for name in _NORMS}
    return {**shapes, "model.norm.weight": (2048,), "lm_head.weight": (32000, 2048)}


def write_mid(directory: Path) -> None:
    """Seeded Gaussian weights, and a tokenizer of 32000 made-up words with a text of them."""
    tensors = {}
    for number, (name, shape) in enumerate(mid_shapes().items()):
        values = np.random.default_rng([0, number]).standard_normal(shape, np.float32) * _STANDARD_DEVIATION
        tensors[name] = (np.ones(shape) if "norm" in name else values).astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(MID, indent=2))
    words = [f"w{index}" for index in range(32000)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    chosen = np.random.default_rng(0).integers(0, 32000, _WORDS_OF_TEXT)
    calibration_text(directory).write_text(" ".join(words[index] for index in chosen))


def write_smollm2(directory: Path, gguf: Path) -> None:
    """The demo's GGUF model as floats, as its authors would have stored it: every tensor bfloat16."""
    shutil.copy(calibration_file(None), calibration_text(directory))
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        floats = Path(scratch) / "floats"
        quantize(gguf, floats, Recipe.model_validate({"name": "none", "linears": {"scheme": "none"}}))
        checkpoint = open_checkpoint(floats)
        tensors = {name: checkpoint.load(name).astype(ml_dtypes.bfloat16) for name in checkpoint.names()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        for name, data in checkpoint.side_files().items():
            (directory / name).write_bytes(data)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2))


def calibration_text(directory: Path) -> Path:
    return directory.with_name(f"{directory.name.removesuffix('.partial')}.txt")


def write_calibration(name: str, directory: Path) -> None:
    """The recipes of calibrated rows, and the very windows that these will choose."""
    recipe = Recipe.model_validate(recipe_of("awq", MODELS[name], calibration_text(directory)))
    settings = recipe.calibration or CalibrationSettings()
    sample = load_sample(open_checkpoint(directory), settings, CalibrationTools(lambda checkpoint: None))
    np.save(directory.with_name(f"{name}.npy"), sample.windows)


def main() -> None:
    name, directory, *gguf = sys.argv[1], Path(sys.argv[2]), *map(Path, sys.argv[3:])
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if name == "mid":
        write_mid(partial)
    else:
        write_smollm2(partial, gguf[0])
    write_calibration(name, partial)
    partial.rename(directory)


if __name__ == "__main__":
    main()
