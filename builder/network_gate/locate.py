"""Which module of a network leaves the reference first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from builder.network.interpreter.engine import InterpretedEngine
from builder.network.interpreter.nodes import Node
from builder.network_gate.reference import GateReference
from plugins.inflight_batching.step import StepInputs


@dataclass(frozen=True)
class ModuleError:
    module: str
    error: float  # of its products' directions: the root mean square over tokens, 1 = unrelated


def module_errors(
    engine: InterpretedEngine, reference: GateReference, ours: StepInputs, theirs: StepInputs
) -> list[ModuleError]:
    """Run the last step again on both, and compare the linear that ends each attention and each MLP, in their order.

    A step writes what it wrote before to the same places, so that nothing changes by it. Directions alone are compared:
    where a network scales each token's inputs, its products are scaled as well.
    """
    found: dict[str, npt.NDArray[np.float32]] = {}
    expected: dict[str, npt.NDArray[np.float32]] = {}

    def observe(rank: int, node: Node, values: npt.NDArray[np.float32]) -> None:
        # The sum over the ranks comes after all of their products, and takes their place.
        found[node.name.removesuffix(":all_reduce")] = values

    engine.observe = observe
    reference.observe(expected.__setitem__)
    try:
        engine.step(ours)
        reference.step(theirs)
    finally:
        engine.observe = None
        reference.observe(None)
    modules = {weight.removesuffix(".weight"): values for weight, values in expected.items()}
    return [
        ModuleError(module, _direction_error(found[module], values))
        for module, values in modules.items()
        if module in found and found[module].shape == values.shape
    ]


def first_to_leave(errors: list[ModuleError], limit: float) -> ModuleError | None:
    """The first with an error of more than ``limit``, or that is not a number."""
    return next((found for found in errors if not found.error <= limit), None)


def _direction_error(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    difference = _directions(found) - _directions(expected)
    return float(np.sqrt((difference**2).sum(axis=-1).mean()))


def _directions(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = rows.astype(np.float64)
    directions: npt.NDArray[np.float64] = exact / np.linalg.norm(exact, axis=-1, keepdims=True)
    return directions
