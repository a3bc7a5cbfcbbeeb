"""The networks of all ranks as one StepEngine on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from builder.network.interpreter.interpreter import Collective, Interpreter
from builder.network.interpreter.lockstep import Meetings, run_lockstep
from builder.network.interpreter.nodes import Node, declared
from builder.network.interpreter.values import Array, Payload, allocate
from builder.parallel import Parallelism
from builder.targets.tensorrt.step_feeds import choose_mode, step_feeds
from plansmith_errors import BuildError, EngineError
from plugins.inflight_batching.step import EngineLimits, StepInputs

_CACHE_BYTES = 6 << 30  # of all ranks and modes together: weights as float32

RankObserver = Callable[[int, Node, Array], None]
"""Called with the world rank, a computed layer and its first output."""


class Network(Protocol):
    """What a target's ``build_network`` returns."""

    @property
    def network(self) -> Any: ...

    @property
    def payloads(self) -> Mapping[str, Payload]: ...

    @property
    def external(self) -> Mapping[str, Payload]: ...

    @property
    def profiles(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]: ...


@dataclass(frozen=True)
class RankNetworks:
    """Both networks of one rank; they share its KV pools. They may be one, with a profile for each mode."""

    mixed: Network
    decode: Network

    @property
    def is_one(self) -> bool:
        return self.mixed.network is self.decode.network


class InterpretedEngine:
    """Implements StepEngine: what the plans of these networks would compute, layer by layer in NumPy.

    ``ranks``: by world number. ``garbage``: fills the KV pools with noise, as memory that was used before has it.
    """

    def __init__(
        self,
        trt: Any,
        ranks: Sequence[RankNetworks],
        parallelism: Parallelism,
        limits: EngineLimits,
        *,
        garbage: np.random.Generator | None = None,
    ) -> None:
        if len(ranks) != parallelism.world_size:
            raise BuildError(f"{len(ranks)} ranks were built, expected {parallelism.world_size}")
        self._limits = limits
        self._meetings = Meetings(parallelism)
        self._last_stage = parallelism.world_size - parallelism.tp_size
        share = _CACHE_BYTES // sum(1 if networks.is_one else 2 for networks in ranks)
        self._ranks: list[_Rank] | None = [
            _Rank(trt, networks, self._meetings.collective(rank), limits.num_blocks, share, garbage)
            for rank, networks in enumerate(ranks)
        ]
        self.observe: RankObserver | None = None

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """See StepEngine. Raises BuildError, with rank and layer named, where a network cannot be executed."""
        ranks = self._ranks
        if ranks is None:
            raise EngineError("the engine is closed; load it again")
        mode = choose_mode(inputs)
        wanted = len(inputs.logits_indices)
        feeds: dict[str, Array] = dict(step_feeds(inputs, self._limits, mode))
        if not wanted:  # no profile takes an empty tensor: one row is computed for nothing
            feeds["logits_indices"] = np.zeros(1, np.int32)
        outputs = run_lockstep(
            self._meetings,
            lambda rank, handed_on: ranks[rank].run(mode, {**feeds, **handed_on}, self._observer(rank)),
        )
        return self._logits(outputs)[:wanted]

    def close(self) -> None:
        """See StepEngine."""
        self._ranks = None

    def _observer(self, rank: int) -> Callable[[Node, Array], None] | None:
        return None if self.observe is None else partial(self.observe, rank)

    def _logits(self, outputs: Sequence[Mapping[str, Array]]) -> npt.NDArray[np.float32]:
        last = outputs[self._last_stage :]
        for rank, output in enumerate(last, self._last_stage):
            if not np.array_equal(output["logits"], last[0]["logits"], equal_nan=True):
                raise BuildError(f"rank {rank} has other logits than rank {self._last_stage}; each must have them all")
        return np.asarray(last[0]["logits"], np.float32)


class _Rank:
    """One rank's two interpreters and its pools."""

    def __init__(
        self,
        trt: Any,
        networks: RankNetworks,
        collective: Collective,
        num_blocks: int,
        cache_bytes: int,
        garbage: np.random.Generator | None,
    ) -> None:
        self._networks = {"mixed": networks.mixed, "decode": networks.decode}

        def interpreter(built: Network) -> Interpreter:
            return Interpreter(
                trt, built.network, built.payloads, collective, external=built.external, cache_bytes=cache_bytes
            )

        mixed = interpreter(networks.mixed)
        self._interpreters = {
            "mixed": mixed,
            "decode": mixed if networks.is_one else interpreter(networks.decode),
        }
        self._pools = _make_pools(networks.mixed.network, num_blocks, garbage)

    def run(
        self, mode: str, feeds: Mapping[str, Array], observe: Callable[[Node, Array], None] | None
    ) -> dict[str, Array]:
        interpreter = self._interpreters[mode]
        given = {**feeds, **self._pools}
        used = {name: given[name] for name in interpreter.input_names if name in given}
        _check_profiles(self._networks[mode].profiles, used)
        return interpreter.run(used, observe)


def _make_pools(network: Any, num_blocks: int, garbage: np.random.Generator | None) -> dict[str, Array]:
    """Inputs "x.N" with an output "x_out.N": they are bound to the same memory."""
    outputs = {network.get_output(index).name for index in range(network.num_outputs)}
    inputs = [declared(network.get_input(index)) for index in range(network.num_inputs)]
    pools = {
        tensor.name: allocate(tensor.dtype, (num_blocks, *tensor.shape[1:]))
        for tensor in inputs
        if "_out.".join(tensor.name.rsplit(".", 1)) in outputs
    }
    if garbage is not None:
        for pool in pools.values():
            pool[...] = (garbage.standard_normal(pool.shape) * 3).astype(pool.dtype)
    return pools


def _check_profiles(profiles: Mapping[str, Sequence[Sequence[int]]], feeds: Mapping[str, Array]) -> None:
    """Raises BuildError where a plan would refuse the shapes of a step."""
    for name, values in feeds.items():
        if name not in profiles:
            continue
        lowest, _, highest = profiles[name]
        if not all(low <= size <= high for low, size, high in zip(lowest, values.shape, highest, strict=True)):
            raise BuildError(
                f"the step's {name} is {list(values.shape)}; the plan takes {list(lowest)} to {list(highest)}"
            )
