"""A TensorRT engine as a StepEngine: the leading rank in this process, each other rank in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from builder.targets.tensorrt.runtime.gpu import Mode
from builder.targets.tensorrt.runtime.layout import EngineLayout
from builder.targets.tensorrt.runtime.messages import Allocate, Join, Loaded, step_message
from builder.targets.tensorrt.runtime.rank import RankRuntime
from builder.targets.tensorrt.runtime.rank_group import RankGroup
from builder.targets.tensorrt.runtime.rank_process import load_open_gpu
from builder.targets.tensorrt.step_feeds import choose_mode, step_feeds
from plansmith_errors import EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

NVIDIA_GPU = "builder.targets.tensorrt.runtime.nvidia_gpu:open_gpu"
_STEP_TIMEOUT_S = 120.0
_KV_SHARE = 0.9  # of the memory that is free after loading; the rest is for contexts and what else uses the GPU


class TensorRtEngine:
    """Implements StepEngine. After an EngineError from ``step`` it is closed: load it again."""

    def __init__(
        self,
        layout: EngineLayout,
        *,
        num_blocks: int | None = None,
        gpu: str = NVIDIA_GPU,
        step_timeout_s: float = _STEP_TIMEOUT_S,
    ) -> None:
        """``num_blocks`` None: as many as fit, the same for every rank. ``gpu``: ``module:function`` that opens one."""
        leader = layout.leader
        others = [rank.rank for rank in layout.parallelism.ranks() if rank != leader]
        self._group = RankGroup(layout, others, gpu, step_timeout_s)
        self._runtime: RankRuntime | None = None
        with self._ending_all():
            self._load(layout, gpu, num_blocks)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine."""
        if self._runtime is None:
            raise EngineError("the engine is closed; load it again")
        mode: Mode = choose_mode(inputs)
        feeds = step_feeds(inputs, self._limits, mode)
        if mode == "decode":
            feeds["block_tables"] = _widened(feeds["block_tables"])
        with self._ending_all():
            if self._group:
                self._group.ask(step_message(mode, feeds))
            self._runtime.start(mode, feeds)
            self._group.answers()  # before we wait for our own GPU, which waits for all the others
            logits = self._runtime.finish()
        if logits is None:
            raise EngineError("the leading rank has no logits; build the engine again")
        return logits

    def close(self) -> None:
        """See StepEngine."""
        self._group.close()
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def _load(self, layout: EngineLayout, gpu: str, num_blocks: int | None) -> None:
        own, communicator = load_open_gpu(gpu)(layout.target, layout.devices[layout.leader.rank]), None
        if self._group:
            unique_id, parallelism = own.new_unique_id(), layout.parallelism
            self._group.ask(Join(unique_id))
            communicator = own.join(unique_id, layout.leader.rank, parallelism.tp_size, parallelism.world_size)
        self._runtime = RankRuntime(layout, layout.leader, own, communicator)
        loaded = [answer for answer in self._group.answers().values() if isinstance(answer, Loaded)]
        loaded.append(
            Loaded(self._runtime.free_bytes(), self._runtime.bytes_per_block, self._runtime.max_blocks),
        )
        blocks = _num_blocks(loaded, num_blocks)
        self._group.ask(Allocate(blocks))
        self._runtime.allocate(blocks)
        self._group.answers()
        self._limits = EngineLimits(
            max_batch_size=layout.max_batch_size,
            max_num_tokens=layout.max_num_tokens,
            max_seq_len=layout.max_seq_len,
            tokens_per_block=layout.tokens_per_block,
            num_blocks=blocks,
            vocab_size=layout.vocab_size,
        )

    @contextmanager
    def _ending_all(self) -> Iterator[None]:
        """A failure of any rank, this one included, is the end of all; what came first is told."""
        try:
            yield
        except EngineError as error:
            cause = self._group.cause_of(error)
            self._end()
            raise cause from None
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """After a failure nobody waits for anybody: a rank may be in a collective that never ends."""
        self._group.kill()
        self._group.close()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.close()


def _num_blocks(ranks: Iterable[Loaded], wanted: int | None) -> int:
    """Blocks that every rank has room and a plan for. Raises EngineError where ``wanted`` or even one does not fit."""
    room = min(int(rank.free_bytes * _KV_SHARE) // max(rank.bytes_per_block, 1) for rank in ranks)
    built_for = min(rank.max_blocks for rank in ranks)
    if wanted is not None and wanted > min(room, built_for):
        raise EngineError(
            f"{wanted} KV blocks do not fit: the GPU has room for {room} and the plan was built for {built_for}"
        )
    if min(room, built_for) < 1:
        raise EngineError("the GPU has no room for a single KV block; use a larger GPU or more of them (tp_size)")
    return min(room, built_for) if wanted is None else wanted


def _widened(block_tables: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """To a power of two of columns: sequences grow, and each new width would be a new CUDA graph.

    The mask hides the columns that are added; they name block 0, which exists.
    """
    width = block_tables.shape[1]
    wanted = 1 << (width - 1).bit_length()
    return np.pad(block_tables, ((0, 0), (0, wanted - width)))
