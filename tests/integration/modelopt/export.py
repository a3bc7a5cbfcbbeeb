"""ModelOpt's own export of a model, run by a Python that has nvidia-modelopt: export.py MODEL WINDOWS.npy OUTPUT"""

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

CONFIGS = {"fp8": mtq.FP8_DEFAULT_CFG, "int4_awq": mtq.INT4_AWQ_CFG, "int8_sq": mtq.INT8_SMOOTHQUANT_CFG}


def main() -> None:
    source, windows, output = sys.argv[1:]
    tokens = torch.from_numpy(np.load(windows))
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
        model.config.dtype = torch.float32  # the exporter takes it from here
        config = copy.deepcopy(config)
        if name == "fp8":
            config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])

        def run(module: torch.nn.Module) -> None:
            with torch.inference_mode():
                for ids in tokens:
                    module(ids[None])

        mtq.quantize(model, config, run)
        export_hf_checkpoint(model, export_dir=Path(output) / name)


if __name__ == "__main__":
    main()
