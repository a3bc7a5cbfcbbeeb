"""What a late stage of the pipeline would refuse is refused before the first one begins."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import quantize
from plansmith.config import BuildFile
from plansmith.source_check import check_source
from plansmith_errors import BuildError

GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def test_a_model_that_the_target_cannot_compute_is_refused_before_it_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, tmp_path / "model.safetensors")
    build_file = BuildFile.model_validate({"model": tmp_path, "quantize": {"recipe": "int4-rtn"}})
    with pytest.raises(BuildError, match=r"no soft cap.*attn_logit_softcapping 50; set build.target to tensorrt"):
        check_source(quantize.open_checkpoint(tmp_path), build_file)
