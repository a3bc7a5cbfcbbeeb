"""ModelOpt's own export of a model, run by a Python that has nvidia-modelopt: export.py MODEL WINDOWS.npy OUTPUT"""

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
from calibrated import calibrated
from modelopt.torch.export import export_hf_checkpoint

CONFIGS = {"fp8": mtq.FP8_DEFAULT_CFG, "int4_awq": mtq.INT4_AWQ_CFG, "int8_sq": mtq.INT8_SMOOTHQUANT_CFG}


def main() -> None:
    source, windows, output = sys.argv[1:]
    for name, model in calibrated(source, windows, CONFIGS):
        export_hf_checkpoint(model, export_dir=Path(output) / name)


if __name__ == "__main__":
    main()
