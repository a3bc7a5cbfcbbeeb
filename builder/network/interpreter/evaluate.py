"""One layer: its inputs widened, computed, rounded to what the network declares, and held against the declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builder.network.interpreter.attention import AttentionInputs, attention_output
from builder.network.interpreter.nodes import Declared, Node
from builder.network.interpreter.operations import ATTENTION_OUTPUT, OPERATIONS
from builder.network.interpreter.values import Array, as_float, is_of, round_to
from plansmith_errors import BuildError

_BAD_INPUT = (ValueError, IndexError, TypeError, KeyError, AttributeError)
"""What NumPy and the operations raise for inputs that do not fit a layer, or a parameter of a value unknown to them."""


def evaluate(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """All outputs of a layer. Raises BuildError that names it where it cannot be computed, or is not as declared."""
    try:
        results = _compute(node, list(inputs))
    except _BAD_INPUT as error:
        raise BuildError(f"{node}: {error} (inputs {_describe(inputs)})") from error
    if isinstance(results[0], AttentionInputs):  # never leaves the attention: its type and shape mean nothing
        return results
    for declared, result in zip(node.outputs, results, strict=True):
        check_declared(str(node), declared, result)
    return results


def _compute(node: Node, inputs: list[Any]) -> tuple[Any, ...]:
    while inputs and inputs[-1] is None:
        inputs.pop()
    if node.kind == ATTENTION_OUTPUT:
        dtype = node.outputs[0].dtype
        return (round_to(dtype, attention_output(node.layer, inputs, dtype)),)
    operation = OPERATIONS[node.kind]
    if operation.moves:
        return (operation.compute(node.layer, inputs),)
    found = operation.compute(node.layer, [None if x is None else as_float(x) for x in inputs])
    results = found if isinstance(found, tuple) else (found,)
    return tuple(round_to(declared.dtype, result) for declared, result in zip(node.outputs, results, strict=True))


def check_declared(where: str, declared: Declared, result: Array) -> None:
    """Raises BuildError where an array is not what the network says of the tensor."""
    fits = len(declared.shape) == result.ndim and all(
        size in (-1, found) for size, found in zip(declared.shape, result.shape, strict=True)
    )
    if not fits or not is_of(declared.dtype, result):
        raise BuildError(
            f"{where}: {declared.name!r} came out as {result.dtype} {list(result.shape)}; "
            f"the network declares {declared.dtype} {list(declared.shape)}"
        )


def _describe(inputs: Sequence[Any]) -> str:
    return ", ".join(f"{x.dtype} {list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__ for x in inputs)
