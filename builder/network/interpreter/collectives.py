"""What each rank gets from a collective (TensorRT's operator page DistCollective; NCCL's user guide, collectives)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from builder.network.interpreter.values import Array
from plansmith_errors import BuildError

_REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "PROD": lambda stacked: stacked.prod(0),
    "MAX": lambda stacked: stacked.max(0),
    "MIN": lambda stacked: stacked.min(0),
    "AVG": lambda stacked: stacked.mean(0),
}


def collect(metadata: Mapping[str, Any], tensors: Sequence[Array], index: int) -> Array:
    """Of rank ``index`` of a group whose ranks brought ``tensors``, in the group's order.

    Sums are float32 and rounded once; NCCL's ring rounds after each rank. Raises BuildError.
    """
    operation = metadata.get("op")
    if operation in ("ALL_REDUCE", "REDUCE_SCATTER"):
        reduction = metadata.get("reduce", "SUM")
        if reduction not in _REDUCTIONS:
            raise BuildError(f"a collective reduces by {reduction!r}; expected one of {', '.join(_REDUCTIONS)}")
        total = _REDUCTIONS[reduction](np.stack(tensors))
        return total if operation == "ALL_REDUCE" else np.split(total, len(tensors))[index]
    if operation == "ALL_GATHER":
        return np.concatenate(tensors)
    if operation == "ALL_TO_ALL":
        return np.concatenate([np.split(tensor, len(tensors))[index] for tensor in tensors])
    if operation == "BROADCAST":
        return tensors[int(metadata.get("root", 0))]
    raise BuildError(
        f"collective {operation!r} is not known; known: ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST"
    )
