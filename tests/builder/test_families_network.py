"""The TensorRT networks of Phi-3, Gemma and Granite, run by the interpreter, compute what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tensorrt_rtx as trt
from tiny_models import TRAITS, VOCAB_SIZE, expected_logits, random_ids, run_mixed, save_model

import builder
import quantize
from builder.network.interpreter import Interpreter
from builder.network.weights import WeightSource
from builder.parallel import Rank
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import NetworkOptions
from builder.targets.tensorrt.step_feeds import choose_mode, step_feeds
from plugins.inflight_batching.step import EngineLimits, StepInputs

LIMITS = EngineLimits(
    max_batch_size=4, max_num_tokens=512, max_seq_len=256, tokens_per_block=32, num_blocks=12, vocab_size=VOCAB_SIZE
)
OPTIONS = NetworkOptions(dtype="float32", max_batch_size=4, max_num_tokens=512, max_seq_len=256, tokens_per_block=32)


class NetworkEngine:
    """Both networks of one rank over pools that are full of what nobody wrote."""

    limits = LIMITS

    def __init__(self, path: Path) -> None:
        checkpoint = quantize.open_checkpoint(path)
        spec = builder.ModelSpec.from_hf_config(checkpoint.config)
        weights = WeightSource(checkpoint, spec)
        self._built = [build_network(trt, spec, weights, Rank(), OPTIONS, mode) for mode in ("mixed", "decode")]
        self._runs = {built.mode: Interpreter(trt, built.network, built.payloads) for built in self._built}
        shape = (LIMITS.num_blocks, spec.num_kv_heads, LIMITS.tokens_per_block, spec.head_dim)
        names = [f"{kind}_pool.{layer}" for kind in ("key", "value") for layer in range(spec.num_layers)]
        self._pools = {name: np.full(shape, 7.0, np.float32) for name in names}

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        mode = choose_mode(inputs)
        feeds = {**step_feeds(inputs, LIMITS, mode), **self._pools}
        run = self._runs[mode]
        logits: npt.NDArray[np.float32] = run.run({name: feeds[name] for name in run.input_names})["logits"]
        return logits


@pytest.mark.parametrize("family", [name for name in TRAITS if name != "granite, tied"])
def test_logits_of_mixed_steps(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, TRAITS[family][0], **TRAITS[family][1])
    ids = random_ids()
    found = run_mixed(NetworkEngine(tmp_path), ids)
    assert np.abs(found - expected_logits(model, ids)).max() < 1e-4
