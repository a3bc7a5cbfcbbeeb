"""A model quantized by ModelOpt, in every one of some configurations."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from transformers import AutoModelForCausalLM


def calibrated(source: str, windows: str, configs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and model of each configuration, calibrated on ``windows``; fp8 with scales of the KV cache."""
    tokens = torch.from_numpy(np.load(Path(windows)))
    torch.set_num_threads(1)
    for name, given in configs.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
        model.config.dtype = torch.float32  # the exporter takes it from here
        config = copy.deepcopy(given)
        if name == "fp8":
            config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])

        def run(module: torch.nn.Module) -> None:
            with torch.inference_mode():
                for ids in tokens:
                    module(ids[None])

        mtq.quantize(model, config, run)
        yield name, model
