"""SmolLM2-135M-Instruct as NVFP4 and MXFP4: what is stored, and that it still answers through the CPU engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo_model import demo_model
from tokenizers import Tokenizer

import builder
import quantize
from plansmith.version import __version__
from plugins.generation import SamplingParams
from plugins.inflight_batching.offline import generate

pytestmark = pytest.mark.integration

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("name", "bound", "bits"), [("nvfp4", 0.083, 4.501), ("mxfp4", 0.115, 4.251)])
def test_every_linear_is_stored_in_four_bits_and_close(tmp_path: Path, name: str, bound: float, bits: float) -> None:
    report = quantize.quantize_checkpoint(demo_model(), tmp_path / "quantized", quantize.load_recipe(name))
    linears = [tensor for tensor in report.tensors if tensor.scheme == name]
    assert len(linears) == 30 * 7
    assert all(tensor.relative_error < 1.1 * bound and tensor.bits_per_weight < bits for tensor in linears)
    assert np.mean([tensor.relative_error for tensor in linears]) < bound


def test_the_model_in_nvfp4_answers(tmp_path: Path) -> None:
    quantize.quantize_checkpoint(demo_model(), tmp_path / "quantized", quantize.load_recipe("nvfp4"))
    (tmp_path / "engine").mkdir()
    options = builder.BuildOptions(max_batch_size=1, max_seq_len=256)
    manifest = builder.build_engine(tmp_path / "quantized", tmp_path / "engine", options, plansmith_version=__version__)
    assert manifest.weights["nvfp4"] == "requantized to int8 per channel"
    checkpoint = quantize.open_checkpoint(tmp_path / "quantized")
    tokenizer = Tokenizer.from_str(checkpoint.side_files()["tokenizer.json"].decode())
    engine = builder.load_engine(tmp_path / "engine", num_threads=2)
    try:
        sampling = SamplingParams(max_tokens=40, temperature=0.0)
        prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
        output = generate(engine, tokenizer, [checkpoint.config["eos_token_id"]], [prompt], sampling)[0]
    finally:
        engine.close()
    assert "Paris" in output.text
