"""Where ranks that run as threads meet: each brings a tensor, each gets all of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from builder.network.interpreter.collectives import collect
from builder.network.interpreter.values import Array
from plansmith_errors import BuildError


class RankEndedError(Exception):
    """Another rank has ended, so that a meeting cannot take place. That rank's error tells why."""


@dataclass
class _Round:
    """Of one group of ranks: what was brought so far, and what the last complete round brought."""

    brought: dict[int, tuple[str, Mapping[str, Any], Array]] = field(default_factory=dict)
    tensors: Sequence[Array] = ()
    number: int = 0


class Meeting:
    """The collectives of the ranks of one pipeline stage, given by their world numbers."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._rounds: dict[tuple[int, ...], _Round] = {}
        self._num_waiting = 0
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def start(self) -> None:
        """Before each step: all ranks are there."""
        with self._changed:
            self._rounds.clear()
            self._ended.clear()
            self._num_waiting = 0

    def end(self, rank: int) -> None:
        """Rank ``rank`` will not come again in this step."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def collective(self, rank: int, layer: str, metadata: Mapping[str, Any], tensor: Array) -> Array:
        """Bring a tensor, wait for the others of the group in ``metadata``, and get this rank's result.

        Raises BuildError where ranks are at different layers or bring different shapes (on GPUs: a deadlock, or
        foreign memory), and RankEndedError where one has ended.
        """
        group = tuple(metadata.get("group", self.ranks))
        if rank not in group or not set(group) <= set(self.ranks):
            raise BuildError(f"collective {layer!r} is of ranks {list(group)}; rank {rank} can meet {list(self.ranks)}")
        tensors = self._exchange(group, rank, (layer, metadata, tensor))
        return collect(metadata, tensors, group.index(rank))

    def _exchange(
        self, group: tuple[int, ...], rank: int, brought: tuple[str, Mapping[str, Any], Array]
    ) -> Sequence[Array]:
        with self._changed:
            meeting = self._rounds.setdefault(group, _Round())
            number = meeting.number
            meeting.brought[rank] = brought
            if len(meeting.brought) == len(group):
                self._finish(group, meeting)
            else:
                self._num_waiting += 1
            while meeting.number == number:
                self._check_hope(group, rank, brought[0])
                self._changed.wait()
            return meeting.tensors

    def _finish(self, group: tuple[int, ...], meeting: _Round) -> None:
        places = [meeting.brought[rank] for rank in group]
        _check_same(group, places)
        meeting.tensors = [tensor for _, _, tensor in places]
        meeting.brought.clear()
        meeting.number += 1
        self._num_waiting -= len(group) - 1
        self._changed.notify_all()

    def _check_hope(self, group: tuple[int, ...], rank: int, layer: str) -> None:
        missing = self._ended.intersection(group)
        if missing:
            raise RankEndedError(f"rank {rank} waits in {layer!r}; rank {min(missing)} has ended")
        if self._num_waiting == len(self.ranks) - len(self._ended):
            raise BuildError(f"rank {rank} waits in {layer!r} while all others wait in other groups: a deadlock")


def _check_same(group: Sequence[int], places: Sequence[tuple[str, Mapping[str, Any], Array]]) -> None:
    first_layer, first_metadata, first_tensor = places[0]
    for rank, (layer, metadata, tensor) in zip(group, places, strict=True):
        if layer != first_layer or dict(metadata) != dict(first_metadata) or tensor.shape != first_tensor.shape:
            raise BuildError(
                f"rank {rank} is in collective {layer!r} {dict(metadata)} with {list(tensor.shape)}, rank {group[0]} "
                f"in {first_layer!r} {dict(first_metadata)} with {list(first_tensor.shape)}"
            )
