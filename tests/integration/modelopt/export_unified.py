"""ModelOpt's TensorRT-LLM checkpoints of a model, for two ranks: export_unified.py MODEL WINDOWS.npy OUTPUT"""

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from calibrated import calibrated
from modelopt.torch.export import export_tensorrt_llm_checkpoint

CONFIGS = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
}


def main() -> None:
    source, windows, output = sys.argv[1:]
    for name, model in calibrated(source, windows, CONFIGS):
        with torch.inference_mode():
            export_tensorrt_llm_checkpoint(
                model, "llama", torch.float16, export_dir=Path(output) / name, inference_tensor_parallel=2
            )


if __name__ == "__main__":
    main()
