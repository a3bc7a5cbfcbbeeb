"""Collectives between the ranks of a tensor-parallel group."""

from __future__ import annotations

import json

from builder.parallel import Rank
from builder.targets.tensorrt.graph import Graph, Tensor


class Collectives:
    """On a single rank each returns what it was given.

    The parameters of a collective layer cannot be read back, so each has them in its metadata, as JSON: ``op``,
    ``reduce`` and ``group``, the world ranks in the order of their parts.
    """

    def __init__(self, graph: Graph, rank: Rank) -> None:
        self._graph = graph
        self._group = rank.tp_group

    def all_reduce(self, x: Tensor, name: str) -> Tensor:
        """The sum over the ranks, on each of them."""
        if len(self._group) == 1:
            return x
        return self._collective(x, "ALL_REDUCE", "SUM", f"{name}:all_reduce")

    def all_gather_last(self, x: Tensor, name: str) -> Tensor:
        """[rows, columns] of each rank to [rows, ranks * columns] on each of them."""
        ranks = len(self._group)
        if ranks == 1:
            return x
        columns = x.shape[1]
        stacked = self._collective(x, "ALL_GATHER", None, f"{name}:all_gather")  # along the first dimension
        by_row = self._graph.shuffle(stacked, (ranks, -1, columns), second=(1, 0, 2))
        return self._graph.shuffle(by_row, (-1, ranks * columns))

    def _collective(self, x: Tensor, operation: str, reduction: str | None, name: str) -> Tensor:
        trt = self._graph.trt
        reduce = trt.ReduceOperation.NONE if reduction is None else getattr(trt.ReduceOperation, reduction)
        kind = getattr(trt.CollectiveOperation, operation)
        layer = self._graph.added(self._graph.network.add_dist_collective(x, kind, reduce, -1, None), name)
        layer.num_ranks = len(self._group)
        layer.metadata = json.dumps({"op": operation, "reduce": reduction, "group": list(self._group)})
        return layer.get_output(0)
