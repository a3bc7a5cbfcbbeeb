"""kill -9 at random moments of real processes: the next run goes on, and its result has the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import builder
import quantize
from plansmith.directories import output_directory, resume_state
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

LAYERS, HIDDEN, INNER, VOCAB = 4, 64, 128, 256
SHARD = 60_000  # bytes: several files
RECIPES = {
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


class Runs:
    """``plansmith quantize -o``, without the start of an interpreter for each."""

    def __init__(self, source: Path, recipe: Recipe) -> None:
        self.source, self.recipe = source, recipe
        self.num_tensors = len(quantize.open_checkpoint(source).names())
        self.num_resumed = 0

    def run(self, output: Path, written: int | None = None) -> int:
        """How many tensors it wrote; a byte goes to ``written`` for each."""
        count = 0

        def progress(done: int, total: int, name: str) -> None:
            nonlocal count
            count += 1
            if written is not None:
                os.write(written, b".")

        def on_resume(done: int, total: int) -> None:
            self.num_resumed = done

        self.num_resumed = 0
        tools = quantize.CalibrationTools(builder.calibration_runner)
        resume = quantize.Resume(resume_state(output), "the same", on_resume)
        with output_directory(output) as partial:
            quantize.quantize_checkpoint(
                self.source,
                partial,
                self.recipe,
                progress=progress,
                max_shard_bytes=SHARD,
                calibration_tools=tools,
                resume=resume,
            )
        return count

    def kill_after(self, output: Path, seconds: float, num_tensors: int = 0) -> int:
        """Kill a process so long after it wrote ``num_tensors``; how many it had written by then."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.run(output, writer)
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            seen = len(file.read(num_tensors))
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return seen + len(file.read())


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("method", RECIPES)
def test_a_hundred_random_moments(source: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # threads of a pool do not survive fork
    recipe = dict(RECIPES[method])
    if method != "rtn":
        recipe["calibration"] = {"text": source / "words.txt", "num_samples": 4, "sequence_length": 32}
    runs = Runs(source, Recipe.model_validate(recipe))
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
    runs = Runs(source, Recipe.model_validate(RECIPES["rtn"]))
    runs.run(tmp_path / "whole")
    for number in range(20):
        if not (tmp_path / "out").exists():
            runs.kill_after(tmp_path / "out", 0.004 * number)
    if not (tmp_path / "out").exists():
        runs.run(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
