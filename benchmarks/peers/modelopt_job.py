"""One job of nvidia-modelopt, run by a Python that has it: modelopt_job.py JOB MODEL OUTPUT THREADS [WINDOWS.npy]

Jobs: fp8, int4 (blockwise) and awq; each ends with the library's export of a Hugging Face checkpoint.
"""

import copy
import sys
import time

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "awq": "INT4_AWQ_CFG",
}
PRESET_GROUP_SIZE, GROUP_SIZE = 128, 64
UNCALIBRATED_WINDOWS = 4, 256  # for the input scales of fp8, which the library's export needs


def main() -> None:
    job, source, output, threads, *windows = sys.argv[1:]
    print(f"started after {time.process_time():.2f} CPU seconds", flush=True)
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True).eval()
    tokens = torch.from_numpy(np.load(windows[0])) if windows else any_tokens()
    config = copy.deepcopy(getattr(mtq, CONFIGS[job]))
    if job != "fp8":
        set_group_size(config)

    def run(module: torch.nn.Module) -> None:
        with torch.inference_mode():
            for ids in tokens:
                module(ids[None])

    mtq.quantize(model, config, None if job == "int4" else run)
    export_hf_checkpoint(model, export_dir=output)


def any_tokens() -> torch.Tensor:
    count, length = UNCALIBRATED_WINDOWS
    return torch.arange(count * length).reshape(count, length)


def set_group_size(config: dict) -> None:
    """Of the weight quantizers, wherever this version keeps it: groups of 128 do not divide all sizes."""
    entries = config["quant_cfg"]
    found = entries.values() if isinstance(entries, dict) else entries
    for entry in found:
        settings = entry.get("cfg", entry) if isinstance(entry, dict) else None
        for part in settings if isinstance(settings, list) else [settings]:
            if isinstance(part, dict) and part.get("block_sizes", {}).get(-1) == PRESET_GROUP_SIZE:
                part["block_sizes"][-1] = GROUP_SIZE


if __name__ == "__main__":
    main()
