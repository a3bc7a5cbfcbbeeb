"""One job of llmcompressor, run by a Python that has it: llmcompressor_job.py JOB MODEL OUTPUT THREADS [WINDOWS.npy]

Jobs: fp8, int4 and gptq through a loaded model; free-fp8, free-int4 and free-nvfp4 by model_free_ptq, file to file.
"""

import sys
import time

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import model_free_ptq, oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SCHEMES = {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4A16"}
GROUP_SIZE = 64


def int4() -> QuantizationScheme:
    """The preset W4A16 in groups that divide every model here; its own are of 128."""
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP_SIZE)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def unused_tokenizer() -> PreTrainedTokenizerFast:
    """The library asks for one even where the data are token ids."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")), pad_token="x")


def quantize_files(kind: str, source: str, output: str) -> None:
    scheme = int4() if kind == "int4" else SCHEMES[kind]
    model_free_ptq(source, output, scheme=scheme, ignore=["lm_head", "model.embed_tokens"], device="cpu")


def quantize_model(job: str, source: str, output: str, windows: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    if job == "fp8":
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=SCHEMES[job], ignore=["lm_head"]))
    elif job == "int4":
        oneshot(model=model, recipe=QuantizationModifier(config_groups={"group_0": int4()}, ignore=["lm_head"]))
    else:
        calibrate(model, np.load(windows[0]))
    model.save_pretrained(output, save_compressed=True)


def calibrate(model: torch.nn.Module, ids: np.ndarray) -> None:
    oneshot(
        model=model,
        processor=unused_tokenizer(),
        dataset=Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}),
        recipe=GPTQModifier(config_groups={"group_0": int4()}, ignore=["lm_head"]),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )


def main() -> None:
    job, source, output, threads, *windows = sys.argv[1:]
    print(f"started after {time.process_time():.2f} CPU seconds", flush=True)
    torch.set_num_threads(int(threads))
    if job.startswith("free-"):
        quantize_files(job.removeprefix("free-"), source, output)
    else:
        quantize_model(job, source, output, windows)


if __name__ == "__main__":
    main()
