"""SmolLM2-135M-Instruct out to every layout, and back through the linter and compressed-tensors' own loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo_model import demo_model
from safetensors.torch import load_file

import quantize
from quantize.export import ExportOptions, export_checkpoint
from quantize.export.options import Format
from quantize.lint import lint_checkpoint
from quantize.recipe import Recipe

pytestmark = pytest.mark.integration

# hidden_size 576 is a multiple of 64 and not of 128.
INT4 = Recipe.model_validate({"name": "int4-g64", "linears": {"scheme": "int4", "group_size": 64, "symmetric": True}})


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "int4"
    quantize.quantize_checkpoint(demo_model(), path, INT4)
    return path


@pytest.mark.parametrize(
    ("layout", "tp_size", "pp_size"), [("trtllm", 3, 2), ("compressed-tensors", 1, 1), ("modelopt", 1, 1)]
)
def test_every_layout_of_the_real_model_is_clean(
    quantized: Path, tmp_path: Path, layout: Format, tp_size: int, pp_size: int
) -> None:
    output = tmp_path / "out"
    report = export_checkpoint(quantized, output, ExportOptions(layout, tp_size=tp_size, pp_size=pp_size))
    assert lint_checkpoint(output, tp_size=tp_size if layout == "trtllm" else None, check_values=True) == []
    stored = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    assert 0 < stored - report.bytes_out < 0.01 * stored
    assert (output / "tokenizer.json").read_bytes() == (quantized / "tokenizer.json").read_bytes()


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # what it says is what is wanted
def test_the_exported_model_knows_the_capital_of_france(quantized: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(2)
    export_checkpoint(quantized, tmp_path / "out", ExportOptions("compressed-tensors", dtype="float32"))
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=settings
    )
    name = "model.layers.11.mlp.down_proj.weight"
    expected = quantize.load_weight(quantize.open_checkpoint(quantized), name).dequantize()
    np.testing.assert_allclose(model.state_dict()[name].numpy(), expected, rtol=1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])


def test_static_fp8_of_the_real_model_keeps_its_digits_on_the_way_to_an_engine(tmp_path: Path) -> None:
    import builder

    rule = {"scheme": "fp8", "granularity": "tensor", "activations": "fp8", "share_scale": True}
    settings = {"num_samples": 2, "sequence_length": 128}
    recipe = Recipe.model_validate({"name": "fp8", "linears": rule, "kv_cache": "fp8", "calibration": settings})
    tools = quantize.CalibrationTools(builder.calibration_runner)
    quantize.quantize_checkpoint(demo_model(), tmp_path / "fp8", recipe, calibration_tools=tools)
    export_checkpoint(tmp_path / "fp8", tmp_path / "out", ExportOptions("trtllm", tp_size=3, pp_size=2))
    assert lint_checkpoint(tmp_path / "out", tp_size=3, pp_size=2, check_values=True) == []
    ranks = [load_file(tmp_path / "out" / f"rank{rank}.safetensors") for rank in range(3, 6)]  # the second stage
    prefix = "transformer.layers.5.mlp.fc"  # layer 20
    parts = [rank[f"{prefix}.weight"].float() * rank[f"{prefix}.weights_scaling_factor"] for rank in ranks]
    found = np.concatenate([part.numpy() for part in parts])
    original = quantize.open_checkpoint(demo_model()).load_float32("model.layers.20.mlp.gate_proj.weight")
    assert np.linalg.norm(found - original) < 0.0275 * np.linalg.norm(original)
