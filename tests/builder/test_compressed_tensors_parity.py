"""An exported model through compressed-tensors' own loader computes what our reference computes on the neutral one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import expected_logits, random_ids, run_mixed, save_model

import builder
import quantize
from builder.targets.reference.engine import ReferenceEngine
from quantize.export import ExportOptions, export_checkpoint
from quantize.recipe import Recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "source"
    save_model(path, "llama", hidden_size=128, intermediate_size=256)
    return path


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # what it says is what is wanted
@pytest.mark.parametrize(
    "linears",
    [
        {"scheme": "int4", "group_size": 64, "symmetric": True},
        {"scheme": "int4", "group_size": 32, "symmetric": False},
        {"scheme": "int8"},
        {"scheme": "fp8"},
    ],
    ids=["int4", "int4-asymmetric", "int8", "fp8"],
)
def test_logits_through_the_librarys_loader(source: Path, tmp_path: Path, linears: dict[str, Any]) -> None:
    quantized, exported = tmp_path / "quantized", tmp_path / "exported"
    quantize.quantize_checkpoint(source, quantized, Recipe.model_validate({"name": "test", "linears": linears}))
    export_checkpoint(quantized, exported, ExportOptions("compressed-tensors", dtype="float32"))
    # Dequantized at load: otherwise fp8 would round the activations too, which the reference does not.
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, quantization_config=settings
    ).eval()
    ids = random_ids(num_seqs=2, num_tokens=20)
    options = builder.BuildOptions(max_batch_size=8, max_num_tokens=64, max_seq_len=64)
    ours = run_mixed(ReferenceEngine(quantized, options, num_blocks=8), ids)
    np.testing.assert_allclose(expected_logits(model, ids), ours, atol=1e-3)
