"""Perplexity of a checkpoint of any of the tools: score_job.py CHECKPOINT TOKENIZER.json TEXT WINDOWS SCRATCH

Windows are of 512 tokens, through the float32 reference. A peer's checkpoint is first decoded into SCRATCH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peer_formats import decode_tensors
from safetensors.numpy import save_file
from tokenizers import Tokenizer

import builder
from quantize import open_checkpoint

WINDOW = 512


def as_floats(directory: Path, scratch: Path) -> Path:
    """``directory`` itself when Plansmith reads it, else a float32 copy."""
    checkpoint = open_checkpoint(directory)
    method = checkpoint.config.get("quantization_config", {}).get("quant_method", "plansmith")
    if method == "plansmith":
        return directory
    scratch.mkdir()
    tensors = {name: checkpoint.load(name) for name in checkpoint.names()}
    save_file(dict(decode_tensors(tensors)), scratch / "model.safetensors")
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (scratch / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    return scratch


def main() -> None:
    directory, tokenizer_path, text, windows, scratch = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    ids = tokenizer.encode(Path(text).read_text(encoding="utf-8"), add_special_tokens=False).ids
    engine = builder.load_reference(as_floats(Path(directory), Path(scratch)), num_blocks=-(-WINDOW // 32))
    print(builder.perplexity(engine, ids, window=WINDOW, max_windows=int(windows)).perplexity)


if __name__ == "__main__":
    main()
