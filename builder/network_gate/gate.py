"""Check the networks of a build, step by step, against the float32 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from builder.model_spec import ModelSpec
from builder.network.weights import WeightSource
from builder.network_gate.bounds import Bounds, bounds_of
from builder.network_gate.comparison import StepResult, compare_logits, step_result
from builder.network_gate.locate import ModuleError, first_to_leave, module_errors
from builder.network_gate.networks import interpreted_engine
from builder.network_gate.reference import TOKENS_PER_BLOCK, GateReference
from builder.network_gate.replay import replay
from builder.network_gate.schedule import ScheduledStep, ScheduleLimits, make_schedule, num_blocks_needed
from builder.parallel import Parallelism
from builder.targets.tensorrt.module import TensorRtTarget
from builder.targets.tensorrt.options import NetworkDtype, NetworkOptions
from plansmith_errors import BuildError

_SEED = 20  # of garbage in the caches and of the places of blocks

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class GateReport:
    dtype: NetworkDtype
    roundings: tuple[str, ...]  # what inputs of linears, keys and values are rounded to
    bounds: Bounds
    steps: tuple[StepResult, ...]  # up to the first that does not pass
    culprit: ModuleError | None  # of a failed step: the first that is further from the reference than logits may be
    longest_sequence: int  # tokens
    unreached_window: int | None  # the shortest sliding window that no sequence is longer than

    @property
    def failed(self) -> StepResult | None:
        """The last step, where it has more tokens beyond a bound than there may be until then."""
        num_tokens = sum(step.num_tokens for step in self.steps)
        num_outliers = sum(step.num_outliers for step in self.steps)
        return self.steps[-1] if num_outliers > self.bounds.outliers(num_tokens) else None


def check_network(
    checkpoint_dir: Path,
    target: TensorRtTarget,
    parallelism: Parallelism,
    options: NetworkOptions,
    token_ids: Sequence[int],
    *,
    progress: Progress | None = None,
) -> GateReport:
    """Interpret the networks of all ranks that a build with ``options`` compiles, on a schedule over ``token_ids``.

    In float32 all but roundings is checked. KV pools begin as garbage. Raises BuildError for what cannot be built,
    CheckpointError for a damaged checkpoint.
    """
    _require_torch()
    gate = _Gate(checkpoint_dir, target, parallelism, options, token_ids, progress)
    return gate.run(progress)


class _Gate:
    def __init__(
        self,
        checkpoint_dir: Path,
        target: TensorRtTarget,
        parallelism: Parallelism,
        options: NetworkOptions,
        token_ids: Sequence[int],
        progress: Progress | None,
    ) -> None:
        from quantize import open_checkpoint

        checkpoint = open_checkpoint(checkpoint_dir)
        spec = ModelSpec.from_hf_config(checkpoint.config)
        weights = WeightSource(checkpoint, spec)
        self.dtype = options.dtype
        self.windows = spec.sliding_windows
        self.steps = make_schedule(_limits(options, spec), token_ids)
        self.engine = interpreted_engine(
            checkpoint_dir,
            target,
            parallelism,
            options,
            num_blocks=num_blocks_needed(self.steps, options.tokens_per_block),
            garbage=np.random.default_rng(_SEED),
            progress=progress,
        )
        rounds_kv = _rounds_kv(options, weights)
        self.reference = GateReference(
            spec,
            weights,
            parallelism,
            max_seq_len=options.max_seq_len,
            num_blocks=num_blocks_needed(self.steps, TOKENS_PER_BLOCK),
            rounds_kv=rounds_kv,
        )
        int8_cache = options.kv_dtype == "int8"
        shared = _input_schemes(weights) | ({"int8"} if rounds_kv else set())
        self.roundings = shared | ({"int8"} if int8_cache else set())
        self.bounds = bounds_of(
            self.dtype,
            spec.num_layers,
            shared,
            is_mixture=spec.mixture is not None,
            int8_cache=int8_cache and not rounds_kv,
        )

    def run(self, progress: Progress | None) -> GateReport:
        report = self._report((), None)
        ours, theirs = replay(self.engine, self.steps, _SEED), replay(self.reference, self.steps, _SEED + 1)
        for number, (step, (inputs, found), (reference_inputs, expected)) in enumerate(
            zip(self.steps, ours, theirs, strict=True)
        ):
            result = step_result(number, str(step), compare_logits(found, expected), self.bounds)
            report = self._report((*report.steps, result), None)
            if progress is not None:
                progress(number + 1, len(self.steps), str(step))
            if report.failed is not None:
                errors = module_errors(self.engine, self.reference, inputs, reference_inputs)
                return self._report(report.steps, first_to_leave(errors, self.bounds.rms_error))
        return report

    def _report(self, steps: tuple[StepResult, ...], culprit: ModuleError | None) -> GateReport:
        return GateReport(
            dtype=self.dtype,
            roundings=tuple(sorted(self.roundings)),
            bounds=self.bounds,
            steps=steps,
            culprit=culprit,
            longest_sequence=_longest(self.steps),
            unreached_window=_unreached(self.windows, _longest(self.steps)),
        )


def _limits(options: NetworkOptions, spec: ModelSpec) -> ScheduleLimits:
    return ScheduleLimits(
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        tokens_per_block=options.tokens_per_block,
        sliding_windows=spec.sliding_windows,
    )


def _input_schemes(weights: WeightSource) -> set[str]:
    """What the inputs of linears are rounded to."""
    matrices = [weights.stored(name) for name, shape in weights.shapes.items() if len(shape) == 2]
    return {weight.activations.scheme for weight in matrices if weight.activations is not None}


def _rounds_kv(options: NetworkOptions, weights: WeightSource) -> bool:
    """Whether the network rounds keys and values by the checkpoint's scales, as the reference can."""
    calibrated = weights.kv_scales(0)
    return options.kv_dtype == "int8" and calibrated is not None and calibrated[0] == "int8"


def _longest(steps: Sequence[ScheduledStep]) -> int:
    return max(chunk.past + len(chunk.ids) for step in steps for chunk in step.chunks)


def _unreached(windows: Sequence[int | None], longest: int) -> int | None:
    return min((window for window in windows if window is not None and window >= longest), default=None)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise BuildError(
            "a check needs the float32 reference, and it torch, which is not installed; run: "
            "pip install 'plansmith[quantize]'"
        ) from None
