"""The gate as a build asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from builder.model_spec import ModelSpec
from builder.network_gate.gate import GateReport, Progress, check_network
from builder.options import BuildOptions
from builder.targets.tensorrt.rank_worker import network_options_of
from plansmith_errors import BuildError

_SEED = 7
_NUM_RANDOM_TOKENS = 4096  # enough that the schedule's sequences share none


def verify_network(
    checkpoint_dir: Path,
    options: BuildOptions,
    token_ids: Sequence[int] | None = None,
    *,
    exact: bool = False,
    progress: Progress | None = None,
) -> GateReport:
    """Interpret the networks of all ranks that ``options`` compile, against the float32 reference, step by step.

    ``token_ids`` None: random ones. ``exact``: float32 in place of ``options.dtype``, which leaves no rounding to hide
    a mistake. Raises BuildError and CheckpointError.
    """
    from quantize import open_checkpoint

    if options.target == "cpu":
        raise BuildError(
            "target cpu is no TensorRT network; choose build.target tensorrt-rtx or tensorrt "
            "(plansmith evaluate --reference holds a cpu engine against the reference)"
        )
    spec = ModelSpec.from_hf_config(open_checkpoint(checkpoint_dir).config)
    if token_ids is None:
        token_ids = np.random.default_rng(_SEED).integers(0, spec.vocab_size, _NUM_RANDOM_TOKENS).tolist()
    network_options = network_options_of(options, options.resolved_max_seq_len(spec), options.sms or ())
    if exact:
        network_options = replace(network_options, dtype="float32")
    return check_network(
        checkpoint_dir, options.target, options.parallelism, network_options, token_ids, progress=progress
    )
