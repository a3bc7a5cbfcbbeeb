"""One rank: its plans on its GPU, its part of the KV pools, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.parallel import Rank
from builder.targets.tensorrt.runtime.buffers import Buffers, bytes_per_block, pool_shape
from builder.targets.tensorrt.runtime.gpu import Communicator, ExecutionContext, Float32, Gpu, Mode, PlanEngine
from builder.targets.tensorrt.runtime.launch import DirectLauncher, GraphLauncher, Launcher, set_shapes
from builder.targets.tensorrt.runtime.layout import EngineLayout
from builder.targets.tensorrt.runtime.tensors import TensorInfo, read_tensors
from plansmith_errors import EngineError

HIDDEN_IN, HIDDEN_OUT, LOGITS = "hidden_in", "hidden_out", "logits"


class RankRuntime:
    """Load, then ``allocate`` the pools, then ``start`` and ``finish`` steps. Raises EngineError.

    ``communicator`` None: a world of one rank.
    """

    def __init__(self, layout: EngineLayout, rank: Rank, gpu: Gpu, communicator: Communicator | None) -> None:
        self._layout, self._rank, self._gpu, self._communicator = layout, rank, gpu, communicator
        self._profiles = _load_profiles(layout, rank, gpu)
        self._tensors = {mode: read_tensors(engine, profile) for mode, (engine, profile) in self._profiles.items()}
        self._pools = {info.name: info for info in self._all_tensors() if info.is_input and info.is_pool}
        self._buffers = Buffers(gpu.device)
        self._buffers.reserve(
            (info for info in self._all_tensors() if info.name not in self._pools and not _is_pool_output(info)),
            {
                LOGITS: (layout.max_num_tokens, layout.vocab_size),
                HIDDEN_OUT: (layout.max_num_tokens, layout.hidden_size),
            },
        )
        self._upload_weights()
        self._launchers: dict[Mode, Launcher] = {}
        self._pool_shapes: dict[str, tuple[int, ...]] = {}
        self._host_logits = np.empty(
            (0, layout.vocab_size), np.float32
        )  # kept: a new one would be touched page by page
        self._logits: Float32 | None = None  # of the step that was started, there when it is finished

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of this rank's layers."""
        return bytes_per_block(self._pools.values())

    @property
    def max_blocks(self) -> int:
        """The most that the plans were built for."""
        return min((info.largest[0] for info in self._pools.values()), default=0)

    def free_bytes(self) -> int:
        return self._gpu.device.free_bytes()

    def allocate(self, num_blocks: int) -> None:
        """The KV pools, zeroed, and the execution contexts over them."""
        self._pool_shapes = {name: pool_shape(info, num_blocks) for name, info in self._pools.items()}
        self._buffers.reserve(self._pools.values(), self._pool_shapes)
        for name in self._pools:
            self._buffers.zero(name)
        for info in self._all_tensors():
            if _is_pool_output(info):
                self._buffers.alias(info.name, info.name.replace("_out.", "."))
        for mode in self._profiles:
            kind = GraphLauncher if mode == "decode" and not self._gpu.captures_graphs else DirectLauncher
            self._launchers[mode] = kind(self._gpu.device, partial(self._make_context, mode))

    def start(self, mode: Mode, feeds: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put one step on the stream; ``finish`` waits for it.

        ``feeds``: the inputs of the step contract as TensorRT's network has them, without pools and weights.
        """
        if mode not in self._launchers:
            raise EngineError(f"the engine has no plan for {mode} steps; build it again")
        tensors, shapes = self._tensors[mode], dict[str, tuple[int, ...]]()
        for name, values in feeds.items():
            if name in tensors:
                self._buffers.upload(name, values)
                shapes[name] = values.shape
        num_tokens = len(feeds["input_ids"])
        if HIDDEN_IN in tensors:
            shapes[HIDDEN_IN] = (num_tokens, self._layout.hidden_size)
            self._hand_over("receive", tensors[HIDDEN_IN], num_tokens, -1)
        self._launchers[mode].launch(shapes)
        if HIDDEN_OUT in tensors:
            self._hand_over("send", tensors[HIDDEN_OUT], num_tokens, +1)
        self._logits = self._download_logits(len(feeds["logits_indices"])) if LOGITS in tensors else None

    def finish(self) -> Float32 | None:
        """Wait; logits [num_logits, vocab_size] of the first rank of the last stage, else None."""
        self._gpu.device.synchronize()
        return self._logits

    def close(self) -> None:
        self._launchers.clear()
        self._profiles.clear()
        if self._communicator is not None:
            self._communicator.close()
        self._gpu.device.close()

    def _download_logits(self, num_logits: int) -> Float32 | None:
        if self._rank != self._layout.leader:
            return None
        if len(self._host_logits) < num_logits:
            self._host_logits = np.empty((num_logits, self._layout.vocab_size), np.float32)
        logits = self._host_logits[:num_logits]
        self._gpu.device.download(logits, self._buffers.address(LOGITS))
        return logits

    def _hand_over(self, direction: str, hidden: TensorInfo, num_tokens: int, stage: int) -> None:
        """Hidden states to or from the rank of the neighbouring stage that has the same place in its group."""
        if self._communicator is None:
            raise EngineError("the plan is a pipeline stage, but its rank is alone; build the engine again")
        num_bytes = hidden.num_bytes((num_tokens, self._layout.hidden_size))
        peer = self._rank.rank + stage * self._rank.parallelism.tp_size
        move = self._communicator.send if direction == "send" else self._communicator.receive
        move(self._buffers.address(hidden.name), num_bytes, peer, self._gpu.device.stream)

    def _make_context(self, mode: Mode) -> ExecutionContext:
        engine, profile = self._profiles[mode]
        context = self._gpu.create_context(engine, mode)
        if profile and not context.set_optimization_profile_async(profile, self._gpu.device.stream):
            raise EngineError(f"TensorRT refuses the plan's profile for {mode} steps; build the engine again")
        set_shapes(context, self._pool_shapes, {})  # the same in every step
        for name in self._tensors[mode]:
            if not context.set_tensor_address(name, self._buffers.address(name)):
                raise EngineError(f"TensorRT takes no address for the tensor {name}; build the engine again")
        group = None if self._communicator is None else self._communicator.tensor_parallel
        if group is not None and not context.set_communicator(group):
            raise EngineError("TensorRT takes no NCCL communicator; does this version support several GPUs?")
        return context

    def _upload_weights(self) -> None:
        """External weights; each is an input that no step feeds."""
        from builder.targets.tensorrt.runtime.external_weights import read_weights

        for file in self._layout.weights[self._rank.rank]:
            for name, values in read_weights(Path(self._layout.directory, file)):
                if name not in self._buffers:
                    raise EngineError(f"{file}: {name} is no input of the plan; build the engine again")
                self._buffers.upload(name, values)

    def _all_tensors(self) -> list[TensorInfo]:
        return [info for tensors in self._tensors.values() for info in tensors.values()]


def _is_pool_output(info: TensorInfo) -> bool:
    return not info.is_input and "_pool_out." in info.name


def _load_profiles(layout: EngineLayout, rank: Rank, gpu: Gpu) -> dict[Mode, tuple[PlanEngine, int]]:
    """For each mode the plan and which of its optimization profiles."""
    profiles: dict[Mode, tuple[PlanEngine, int]] = {}
    for plan in layout.plans[rank.rank]:
        engine = gpu.deserialize(Path(layout.directory, plan.name))
        profiles |= {mode: (engine, profile) for profile, mode in enumerate(plan.modes)}
    return profiles
