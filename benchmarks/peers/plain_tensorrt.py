"""The same network compiled by a plain script: everything in one process, the plan taken as bytes and written.

Prints the seconds that TensorRT's own call took.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.parallel import Rank
from builder.targets.tensorrt.module import load_module
from builder.targets.tensorrt.network import build_network
from builder.targets.tensorrt.options import MODES, NetworkOptions
from quantize import open_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--sm", type=int, required=True)
    arguments = parser.parse_args()
    trt = load_module("tensorrt-rtx")
    checkpoint = open_checkpoint(arguments.checkpoint)
    spec = ModelSpec.from_hf_config(checkpoint.config)
    options = NetworkOptions(max_batch_size=32, max_num_tokens=512, max_seq_len=4096, sms=(arguments.sm,))
    built = build_network(trt, spec, WeightSource(checkpoint, spec), Rank(), options)
    config = built.builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{arguments.sm}"), 0)
    for mode in MODES:
        profile = built.builder.create_optimization_profile()
        for name, (low, usual, high) in built.graph.profiles[mode].items():
            profile.set_shape(name, low, usual, high)
        config.add_optimization_profile(profile)
    begin = time.perf_counter()
    plan = built.builder.build_serialized_network(built.network, config)
    seconds = time.perf_counter() - begin
    arguments.plan.write_bytes(bytes(plan))
    print(seconds)


if __name__ == "__main__":
    main()
