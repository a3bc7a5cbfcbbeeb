"""kill -9 at random moments of real processes: the next run goes on, and its result has the same bytes."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import Runs
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.integration

LAYERS, HIDDEN, INNER, VOCAB = 4, 64, 128, 256
RECIPES: dict[str, dict[str, Any]] = {
    "rtn": {"name": "rtn", "linears": {"scheme": "int4", "group_size": 32}, "embeddings": {"scheme": "fp8"}},
    "awq": {"name": "awq", "linears": {"scheme": "int4", "group_size": 32, "method": "awq"}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (HIDDEN, INNER)
    weights = {
        f"{name}.weight": (rng.normal(0, 0.05, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, path / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "words.txt").write_text(" ".join(f"w{token}" for token in rng.integers(0, VOCAB, 2000)))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("method", RECIPES)
def test_a_hundred_random_moments(source: Path, tmp_path: Path, method: str) -> None:
    recipe = dict(RECIPES[method])
    if method != "rtn":
        recipe["calibration"] = {"text": str(source / "words.txt"), "num_samples": 4, "sequence_length": 32}
    with Runs(source, recipe) as runs:
        runs.run(tmp_path / "warm")
        begin = time.perf_counter()
        assert runs.run(tmp_path / "whole") == runs.num_tensors
        seconds = time.perf_counter() - begin
        whole = contents(tmp_path / "whole")
        moments = random.Random(0)
        unfinished = number = resumed = 0
        while unfinished < 100:
            number += 1
            assert number < 400
            output = tmp_path / f"out{number}"
            if number % 2:
                finished = runs.kill_after(output, moments.uniform(0, seconds))
            else:  # a machine that is busy would spend most of the time above before the first tensor
                finished = runs.kill_after(output, moments.uniform(0, 0.002), moments.randrange(1, runs.num_tensors))
            if output.exists():  # it was faster
                assert contents(output) == whole
                continue
            unfinished += 1
            written = runs.run(output)
            assert contents(output) == whole
            assert written == runs.num_tensors - runs.num_resumed
            assert runs.num_resumed >= finished
            resumed += runs.num_resumed > 0
            assert not list(tmp_path.glob(f".{output.name}.*"))
        assert resumed > 20


def test_killed_again_and_again(source: Path, tmp_path: Path) -> None:
    with Runs(source, RECIPES["rtn"]) as runs:
        runs.run(tmp_path / "whole")
        for number in range(20):
            if not (tmp_path / "out").exists():
                runs.kill_after(tmp_path / "out", 0.004 * number)
        if not (tmp_path / "out").exists():
            runs.run(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
