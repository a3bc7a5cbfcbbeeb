"""ModelOpt's TensorRT-LLM checkpoints of a model, for two ranks: export_unified.py MODEL WINDOWS.npy OUTPUT"""

import copy
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from transformers import AutoModelForCausalLM

CONFIGS = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
}


def main() -> None:
    source, windows, output = sys.argv[1:]
    tokens = torch.from_numpy(np.load(windows))
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
        config = copy.deepcopy(config)
        if name == "fp8":
            config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])

        def run(module: torch.nn.Module) -> None:
            with torch.inference_mode():
                for ids in tokens:
                    module(ids[None])

        mtq.quantize(model, config, run)
        with torch.inference_mode():
            export_tensorrt_llm_checkpoint(
                model, "llama", torch.float16, export_dir=Path(output) / name, inference_tensor_parallel=2
            )


if __name__ == "__main__":
    main()
